"""A finished training run as MLflow shows it: parameters, curves, test metrics, confusion, predictions, the model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deco_ray.models.saved import load_facts
from deco_ray.results import mlflow_model
from deco_ray.results.figures import confusion_figure
from deco_ray.results.run_files import read_frame, read_metrics

if TYPE_CHECKING:
    from deco_ray.results.tracking_run import RunHandle

SHOWN = ("name", "dim", "seed", "encoder")  # of model.json, as parameters


def log_run(run: RunHandle, folder: Path, params: Mapping[str, Any], tags: Mapping[str, Any]) -> None:
    """Log a "model" artefact folder and mark the run complete."""
    facts = load_facts(folder)
    metrics = read_metrics(folder)
    classes = facts["classes"]
    described = {f"model.{name}": facts[name] for name in SHOWN if facts.get(name) is not None}
    run.log_params(
        {**described, **{f"model.{name}": value for name, value in facts.get("options", {}).items()}, **params}
    )
    run.set_tags({**tags, "deco.artefact": folder})
    run.log_epochs(read_frame(folder / "history.parquet"))
    run.log_metrics(named_metrics(metrics, classes))
    confusion = metrics.get("test", {}).get("confusion")
    if confusion:
        run.log_figure(confusion_figure(np.asarray(confusion), classes, "Test slides"), "confusion_test")
    run.log_table(read_frame(folder / "predictions.parquet"), "predictions")
    if run.tracker.section.log_models:
        log_model(run, folder)
    run.finish()


def named_metrics(metrics: Mapping[str, Any], classes: Sequence[str]) -> dict[str, float]:
    """metrics.json as flat `test/acc` names, per-class F1 under the class's name."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": found for key, found in named_metrics(value, classes).items()}
        elif name == "f1_per_class":
            flat |= {f"f1 {label}": found for label, found in zip(classes, value)}
        else:
            flat[name] = value
    return flat


def log_model(run: RunHandle, folder: Path) -> None:
    """The model under the run (`runs:/<run id>/model`) and as a logged model; one that is there is left alone."""

    def write(client: Any) -> None:
        from mlflow.entities import LoggedModelOutput

        known = client.search_logged_models(
            [run.tracker.experiment_id], f"source_run_id = '{run.run_id}' AND name = '{mlflow_model.NAME}'"
        )
        if any(str(model.status) == "READY" for model in known):
            return
        for model in known:  # begun by an attempt that was killed
            client.delete_logged_model(model.model_id)
        model = client.create_logged_model(
            run.tracker.experiment_id,
            name=mlflow_model.NAME,
            source_run_id=run.run_id,
            tags={"deco.digest": run.digest},
        )
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / mlflow_model.NAME
            mlflow_model.save(folder, target, str(run.run_id), model.model_id)
            client.log_model_artifacts(model.model_id, str(target))
        client.finalize_logged_model(model.model_id, "READY")
        client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, 0)])

    run.write(write)
