"""What a study found: every run's metrics in one frame, and the predictions behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from deco_ray.experiments.methods import Run
from deco_ray.experiments.site import Site
from deco_ray.results.bootstrap import Predictions
from deco_ray.results.run_files import read_frame, read_metrics

RESULTS = "results.parquet"


def model_folder(run: Run, sites: Mapping[str, Site], digest: str | None = None) -> Path:
    return sites[run.site].store.path("model", digest or run.model)


def finished(runs: Iterable[Run], sites: Mapping[str, Site]) -> list[Run]:
    """The runs whose model exists (a failed seed leaves the others)."""
    return [run for run in runs if sites[run.site].store.exists("model", run.model)]


def results_frame(runs: Iterable[Run], sites: Mapping[str, Site]) -> pd.DataFrame:
    """One row per (method, setting, seed, metric): test metrics, and validation macro-F1 as `val_macro_f1`."""
    rows = []
    for run in runs:
        found = read_metrics(model_folder(run, sites))
        values = {
            name: value for name, value in found["test"].items() if isinstance(value, (int, float)) and name != "n"
        }
        values["val_macro_f1"] = found["val"]["macro_f1"]
        values["best_epoch"] = found["best_epoch"]
        values |= {
            f"f1_{label}": value for label, value in enumerate(found["test"]["f1_per_class"]) if value is not None
        }
        rows += [
            {"method": run.method, "setting": run.setting, "seed": run.seed, "metric": name, "value": float(value),
             "model": run.model}
            for name, value in values.items()
        ]  # fmt: skip
    columns = ["method", "setting", "seed", "metric", "value", "model"]
    return pd.DataFrame(rows, columns=columns)


def read_predictions(runs: Iterable[Run], sites: Mapping[str, Site]) -> Predictions:
    """Test predictions of one method over its seeds."""
    return Predictions.read({run.seed: model_folder(run, sites) for run in runs})


def histories(runs: Iterable[Run], sites: Mapping[str, Site]) -> dict[int, pd.DataFrame]:
    """Epoch curves by seed."""
    return {run.seed: read_frame(model_folder(run, sites) / "history.parquet") for run in runs}


def as_judges(runs: Iterable[Run]) -> list[Run]:
    """The judges of DeCo runs, as runs of their own: the other half of the judge-final comparison."""
    return [Run("judge", run.setting, run.seed, run.judge, site=run.site) for run in runs if run.judge]
