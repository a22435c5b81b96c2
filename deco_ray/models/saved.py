"""A trained model from its artefact folder: model.json says what it is, model.pt holds the weights."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator
from deco_ray.models.registry import create_model
from deco_ray.models.tensors import load_tensors

FACTS, WEIGHTS = "model.json", "model.pt"


def slide_mark(slide_id: str) -> str:
    """Tells a slide to whoever has it: a model gets about, and slide ids can name patients."""
    return hashlib.sha256(slide_id.encode()).hexdigest()[:16]


def load_facts(folder: str | Path) -> dict[str, Any]:
    """model.json: name, options, dim, classes, encoder, train_counts, seen_slides (marks), seed."""
    path = Path(folder) / FACTS
    try:
        facts = json.loads(path.read_text())
        if not isinstance(facts["name"], str) or not facts["classes"] or int(facts["dim"]) < 1:
            raise ValueError("name, dim or classes are empty")
        if not isinstance(facts.get("seen_slides", []), list):
            raise ValueError("seen_slides is no list")
    except FileNotFoundError:
        raise ModelError(
            f"no trained model at {folder} (no {FACTS} there); give the folder of a finished run"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} is damaged ({error!r}); train the model again") from error
    return facts


def load_model(folder: str | Path, dim: int | None = None) -> tuple[Aggregator, dict[str, Any]]:
    """The model on the CPU in evaluation mode, and its facts; `dim` is what the features at hand have."""
    facts = load_facts(folder)
    if dim is not None and dim != facts["dim"]:
        raise ModelError(
            f"the model at {folder} was trained on {facts['dim']}-dimensional features "
            f"(encoder {facts.get('encoder')}), these have {dim}; use features of the same encoder"
        )
    model = create_model(facts["name"], int(facts["dim"]), len(facts["classes"]), **(facts.get("options") or {}))
    path = Path(folder) / WEIGHTS
    try:
        model.load_state_dict(load_tensors(path))
    except FileNotFoundError:
        raise ModelError(f"no weights at {path}; train the model again") from None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"{path} does not hold the weights of a {facts['name']} with {facts['dim']} features and "
            f"{len(facts['classes'])} classes: {str(error).splitlines()[0] if str(error) else type(error).__name__}; "
            "train the model again"
        ) from error
    return model.eval(), facts
