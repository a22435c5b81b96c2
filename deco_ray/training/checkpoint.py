"""The state of an unfinished run in one file, replaced atomically after every epoch."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from deco_ray.models.tensors import load_tensors, save_tensors

logger = logging.getLogger(__name__)
CHECKPOINT = "checkpoint.pt"


@dataclass
class TrainingState:
    """All that the next epoch depends on; random draws need no state, since they come from keys."""

    epoch: int = 0  # the next one to run
    model: dict[str, Tensor] = field(default_factory=dict)
    optimiser: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_epoch: int = -1
    best_score: float = -1.0
    best_val_logits: Tensor | None = None  # [n_val, C]
    history: list[dict[str, Any]] = field(default_factory=list)
    resumes: int = 0


def save_checkpoint(folder: Path, state: TrainingState) -> None:
    save_tensors(folder / CHECKPOINT, {entry.name: getattr(state, entry.name) for entry in fields(state)})


def load_checkpoint(folder: Path) -> TrainingState | None:
    """The state to resume from, with one more resume counted; None where there is nothing usable.

    A file that cannot be read is moved aside with a logged reason, and the run starts again.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        content = load_tensors(path)
        missing = {entry.name for entry in fields(TrainingState)} - set(content)
        if missing:
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        state = TrainingState(**content)
    except Exception as error:  # a damaged zip, pickle or tensor each raises something else
        aside = path.with_name(f"broken-{time.time_ns()}.pt")
        path.rename(aside)
        logger.warning("%s cannot be read (%s); moved to %s, the run starts again", path, error, aside.name)
        return None
    state.resumes += 1
    return state
