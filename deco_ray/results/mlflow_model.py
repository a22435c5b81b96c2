"""A trained aggregator as an MLflow model that answers requests: one bag of patch features in, probabilities out.

    mlflow models serve -m models:/<model id> --env-manager local      (or -m runs:/<run id>/model)
    curl -d '{"inputs": [[…d numbers…], …N rows…]}' -H 'Content-Type: application/json' http://127.0.0.1:5000/invocations
    -> {"predictions": [p_0, …, p_{C-1}]}

One request is one slide. Rows may come straight from the encoder: they are brought to unit length here (Eq. 1).
The weights are a state dict read with `weights_only=True`; nothing in the model is pickled code.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deco_ray.cohort.store import unit_rows
from deco_ray.errors import ModelError
from deco_ray.keys import generator
from deco_ray.models.saved import FACTS, WEIGHTS, load_facts, load_model
from deco_ray.training.losses import adjust_logits, log_prior

EXAMPLE_PATCHES = 2  # the least that shows that N varies
NAME = "model"


class ServedModel:
    """What MLflow calls: `predict` takes one bag [N, d] and returns its class probabilities [C]."""

    def __init__(self, folder: Path) -> None:
        self.model, self.facts = load_model(folder)

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> np.ndarray:  # [N, d] -> [C]
        bag = np.asarray(data, dtype=np.float32)
        if bag.ndim != 2 or not len(bag) or bag.shape[1] != self.facts["dim"]:
            raise ModelError(f"a bag is [N, {self.facts['dim']}] with at least one patch; got shape {list(bag.shape)}")
        if not np.isfinite(bag).all() or not np.abs(bag).max(1).all():
            raise ModelError("a bag may hold neither NaN nor infinite values nor all-zero patches")
        with torch.inference_mode():
            logits = self.model(unit_rows(bag))
            tau = self.facts.get("post_hoc_tau") or 0.0  # as in the run's own evaluation
            if tau:
                logits = adjust_logits(logits, log_prior(self.facts["train_counts"]), tau)
            return logits.softmax(-1).numpy()


def _load_pyfunc(path: str) -> ServedModel:
    """Called by MLflow with the folder that holds model.pt and model.json."""
    return ServedModel(Path(path))


def save(folder: Path, target: Path, run_id: str, model_id: str) -> None:
    """Write the MLflow model of a run's artefact folder to `target`, saying which run it came from."""
    import mlflow.pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    facts = load_facts(folder)
    dim, classes = facts["dim"], facts["classes"]
    number = np.dtype("float32")
    weights = target.with_name("weights")
    weights.mkdir()
    for name in (FACTS, WEIGHTS):
        shutil.copyfile(folder / name, weights / name)
    mlflow.pyfunc.save_model(
        str(target),
        loader_module=__name__,
        data_path=str(weights),
        mlflow_model=Model(run_id=run_id, model_id=model_id),
        signature=ModelSignature(
            Schema([TensorSpec(number, (-1, dim))]), Schema([TensorSpec(number, (len(classes),))])
        ),
        input_example=generator("input example").standard_normal((EXAMPLE_PATCHES, dim), dtype=np.float32),
        # deco_ray itself is left out: it is on no index, and a stranger's package of that name must not get in
        pip_requirements=[f"{name}=={version(name)}" for name in ("mlflow", "numpy", "torch")],
        metadata={"classes": list(classes), "encoder": facts.get("encoder"), "output": "probabilities"},
    )
