"""The training loop: one slide a step, validation every epoch, the best epoch kept, resumable to the bit.

Judge, baselines and final model share it; they differ in the bags and visits that their spec asks for.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deco_ray.models.protocol import Aggregator
from deco_ray.progress import bar
from deco_ray.results.metrics import evaluate
from deco_ray.training.adam import PlainAdam
from deco_ray.training.checkpoint import TrainingState, load_checkpoint, save_checkpoint
from deco_ray.training.engine import Engine, Features
from deco_ray.training.group import Solo
from deco_ray.training.phases import (
    needed_slides,
    phases,
    restart_classifier,
    trainable,
)
from deco_ray.training.slides import RunSlides, Source
from deco_ray.training.spec import RunSpec

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: its best epoch by validation macro-F1, the earliest of equals."""

    state: dict[str, Tensor]
    best_epoch: int
    val_logits: Tensor  # [n_val, C], of the best epoch, after any post-hoc adjustment
    history: list[dict[str, Any]]  # one row an epoch
    resumes: int


def train(
    model: Aggregator,
    spec: RunSpec,
    slides: RunSlides,
    source: Source,
    *,
    work: Path | None = None,
    report: Report | None = None,
    device: str = "cpu",
    group: Solo | None = None,
    label: str = "",
) -> Outcome:
    """Train a freshly built model; with a `work` folder, from its checkpoint if there is one.

    `report` receives each epoch's finite metrics as plain numbers; `label` names a progress bar.
    """
    section, group = spec.training, group or Solo()
    engine = Engine(model.to(device), spec, slides, torch.device(device), group)
    initial = copied(model.state_dict())
    state = (load_checkpoint(work) if work else None) or TrainingState()
    if state.epoch:
        model.load_state_dict(state.model)
    _, steps = engine.share(phases(section)[0], 0)
    with bar(steps * spec.epochs, label, "slide", initial=state.epoch * steps) as shown:
        for phase in phases(section):
            if state.epoch >= phase.end:
                continue
            if phase.classifier_only and state.epoch == phase.first:
                restart_classifier(model, initial, state.best)
                state.best, state.best_epoch, state.best_score = {}, -1, -1.0
            optimiser = PlainAdam(trainable(model, phase), lr=section.lr, weight_decay=section.weight_decay, fused=True)
            scaler = torch.amp.GradScaler(device, enabled=engine.mixed)
            if state.epoch > phase.first:
                optimiser.load_state_dict(state.optimiser)
                scaler.load_state_dict(state.scaler)
            plans = (engine.share(phase, epoch)[0] for epoch in range(state.epoch, phase.end))
            features = source.bags(needed_slides(plans, slides.val if group.rank == 0 else []))
            with contextlib.closing(features):  # type: ignore[type-var]
                for epoch in range(state.epoch, phase.end):
                    row = engine.epoch(phase, epoch, features, optimiser, scaler, shown)
                    stop = False
                    if group.rank == 0:
                        state = judged(engine, state, row, features)
                        stop = section.early_stop is not None and epoch - state.best_epoch >= section.early_stop
                    stop = group.agree(stop)
                    state.epoch = phase.end if stop else epoch + 1
                    if group.rank == 0:
                        state.model, state.optimiser = model.state_dict(), optimiser.state_dict()
                        state.scaler = scaler.state_dict()
                        if work:
                            save_checkpoint(work, state)
                        if report:
                            report(finite(row))
                    if stop:
                        break
    assert state.best_val_logits is not None or group.rank
    return Outcome(state.best, state.best_epoch, state.best_val_logits, state.history, state.resumes)  # type: ignore[arg-type]


def judged(engine: Engine, state: TrainingState, row: dict[str, Any], features: Features) -> TrainingState:
    """The state after validation: the row in its history, and the model kept if this epoch is the best so far."""
    started = time.perf_counter()
    logits = engine.predict(features, engine.slides.val)
    truth = [engine.slides.labels[slide] for slide in engine.slides.val]
    metrics = evaluate(truth, logits.double().softmax(-1), engine.slides.groups)
    row["val_loss"] = F.cross_entropy(logits, torch.tensor(truth)).item()
    row.update({f"val_{name}": value for name, value in metrics.items() if isinstance(value, float | None)})
    row["seconds"] += time.perf_counter() - started
    state.history.append(row)
    if metrics["macro_f1"] > state.best_score:  # strictly: the earliest of equals wins
        state.best, state.best_epoch = copied(engine.model.state_dict()), row["epoch"]
        state.best_score, state.best_val_logits = metrics["macro_f1"], logits
    return state


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """Plain values without None, NaN or infinities, which break trackers and searchers alike."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, str) or (value is not None and math.isfinite(value))
    }
