"""For tests of stages and pipelines: tiny settings, features in memory, fingerprints of what must not change."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from deco_ray.cohort import Cohort
from deco_ray.config import Config, with_settings
from deco_ray.training.slides import LocalSource


@dataclass(frozen=True)
class InMemory:
    """Features of a tiny cohort without Ray's object store: the stage runs in this process."""

    cohort: Cohort

    def open(self) -> LocalSource:
        return LocalSource.read(self.cohort, self.cohort.slides["slide_id"])


def tiny_config(cohort: str, storage: Path | str, **settings) -> Config:
    """Two seeds, two epochs, six anchors: the whole method in seconds."""
    return with_settings(
        Config(),
        {
            "name": "tiny",
            "cohort": str(cohort),
            "storage": str(storage),
            "seeds": [0, 1],
            "split.val_per_class": 2,
            "split.test_per_class": 2,
            "anchors.k": 6,
            "anchors.k_normal": 3,
            "judge_training.epochs": 2,
            "training.epochs": 2,
            "tracking.enabled": False,
            "report.heatmaps": 1,
            "report.pdf": False,
            **settings,
        },
    )


def fingerprint(storage: Path | str) -> dict[str, str]:
    """A hash of the numbers in every anchors, contributions and model artefact, by kind and digest."""
    found = {}
    for record in sorted(Path(storage).glob("*/*/*/artefact.json")):
        folder = record.parent
        kind = folder.parent.name
        if kind == "anchors":
            with np.load(folder / "anchors.npz") as saved:
                parts = [saved[name].tobytes() for name in ("anchors", "normals", "match")]
        elif kind == "contributions":
            table = pd.read_parquet(folder / "contributions.parquet")
            parts = [table[name].to_numpy().tobytes() for name in table.columns if name != "slide_id"]
            parts.append("|".join(table["slide_id"]).encode())
        elif kind == "model":
            state = torch.load(folder / "model.pt", weights_only=True)
            parts = [state[name].numpy().tobytes() for name in sorted(state)]
            metrics = json.loads((folder / "metrics.json").read_text())
            parts.append(json.dumps({part: metrics[part] for part in ("val", "test", "best_epoch")}).encode())
        else:
            continue
        found[f"{kind}/{folder.name}"] = hashlib.sha256(b"".join(parts)).hexdigest()
    return found


def leftovers(storage: Path | str) -> list[str]:
    """Temporary files and folders that nobody needs any more."""
    return [str(path) for path in Path(storage).rglob("*") if path.name.endswith(".tmp") or path.parent.name == "work"]
