"""What a finished run leaves on disk: weights, history, predictions of every slide, metrics."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from deco_ray.cohort.store import Cohort
from deco_ray.models.protocol import Aggregator
from deco_ray.models.saved import FACTS, WEIGHTS, slide_mark
from deco_ray.models.tensors import save_tensors
from deco_ray.results.metrics import evaluate
from deco_ray.training.engine import Engine
from deco_ray.training.group import Solo
from deco_ray.training.loop import Outcome
from deco_ray.training.slides import RunSlides, Source
from deco_ray.training.spec import RunSpec


def write_run(
    folder: Path,
    model: Aggregator,
    spec: RunSpec,
    cohort: Cohort,
    slides: RunSlides,
    source: Source,
    outcome: Outcome,
    device: str = "cpu",
) -> None:
    """Fill an artefact folder; the test slides are predicted here, once, with the best epoch's weights."""
    model.load_state_dict(outcome.state)
    engine = Engine(model, spec, slides, torch.device(device), Solo())
    with contextlib.closing(source.bags(slides.test)) as features:  # type: ignore[type-var]
        test_logits = engine.predict(features, slides.test)
    facts = {
        "name": spec.model.name,
        "options": spec.model.options,
        "dim": cohort.dim,
        "classes": list(cohort.classes),
        "normal_class": cohort.meta.normal_class,
        "encoder": cohort.meta.encoder,
        "train_counts": slides.train_counts,
        "seen_slides": [slide_mark(slide) for slide in (*slides.train, *slides.val)],  # trained on or chosen by
        "post_hoc_tau": spec.training.post_hoc_tau,
        "seed": spec.seed,
    }
    save_tensors(folder / WEIGHTS, outcome.state)
    (folder / FACTS).write_text(json.dumps(facts, indent=1))
    pd.DataFrame(outcome.history).to_parquet(folder / "history.parquet", index=False)
    tables = []
    metrics: dict[str, Any] = {}
    for part, ids, logits in (("val", slides.val, outcome.val_logits), ("test", slides.test, test_logits)):
        probabilities = logits.double().softmax(-1).numpy()
        labels = [slides.labels[slide] for slide in ids]
        metrics[part] = evaluate(labels, probabilities, slides.groups)
        tables.append(predictions_table(part, ids, labels, probabilities))
    pd.concat(tables).to_parquet(folder / "predictions.parquet", index=False)
    metrics |= {"best_epoch": outcome.best_epoch, "epochs": len(outcome.history), "resumes": outcome.resumes}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=1, allow_nan=False))


def predictions_table(part: str, ids: list[str], labels: list[int], probabilities: np.ndarray) -> pd.DataFrame:
    """One row a slide: split, slide_id, label, p_0 … p_{C-1}."""
    columns = {f"p_{label}": probabilities[:, label] for label in range(probabilities.shape[1])}
    return pd.DataFrame({"split": part, "slide_id": ids, "label": labels, **columns})
