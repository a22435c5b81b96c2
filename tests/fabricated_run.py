"""A "model" artefact folder as a finished training leaves it, without training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from deco_ray.keys import generator, torch_seed
from deco_ray.models import create_model
from deco_ray.results.metrics import evaluate

CLASSES = ("normal", "low grade", "high grade")


def write_run_artefact(
    folder: Path, seed: int = 0, name: str = "abmil", dim: int = 16, epochs: int = 4, **facts
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(torch_seed(seed, "fabricated weights"))
    torch.save(create_model(name, dim, len(CLASSES)).state_dict(), folder / "model.pt")
    known = {"name": name, "options": {}, "dim": dim, "classes": CLASSES, "encoder": "made-up", "seed": seed}
    (folder / "model.json").write_text(json.dumps({**known, "train_counts": [9, 5, 2], **facts}))

    rng = generator(seed, "fabricated run")
    falling = np.exp(-np.arange(epochs) / 3) + 0.05 * rng.random(epochs)
    history = {"epoch": range(epochs), "train_loss": falling, "val_macro_f1": 0.9 - 0.6 * falling}
    pd.DataFrame({**history, "val_auc": [np.nan, *[0.8] * (epochs - 1)]}).to_parquet(folder / "history.parquet")

    labels = np.arange(30) % 3
    scores = rng.dirichlet(np.ones(3), 30) + 0.3 * np.eye(3)[labels]
    scores /= scores.sum(1, keepdims=True)
    rows = {"split": ["val"] * 12 + ["test"] * 18, "slide_id": [f"s{i:02d}" for i in range(30)], "label": labels}
    predictions = pd.DataFrame({**rows, **{f"p_{c}": scores[:, c] for c in range(3)}})
    predictions.to_parquet(folder / "predictions.parquet")
    groups = {"head": [0], "medium": [1], "tail": [2]}
    metrics = {"val": evaluate(labels[:12], scores[:12], groups), "test": evaluate(labels[12:], scores[12:], groups)}
    (folder / "metrics.json").write_text(json.dumps({**metrics, "best_epoch": epochs - 1, "resumes": 0}))
    return folder
