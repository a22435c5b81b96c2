"""From a model's name in the configuration to the model."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator

# name -> (module, class); imported when first asked for
REGISTRY = {
    "abmil": ("abmil", "ABMIL"),
}


def model_names() -> list[str]:
    return list(REGISTRY)


def create_model(name: str, dim: int, classes: int, **options: Any) -> Aggregator:
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ModelError(f"unknown model {name!r}{hint} Known: {', '.join(REGISTRY)}")
    module, attribute = REGISTRY[name]
    factory = getattr(importlib.import_module(f"deco_ray.models.{module}"), attribute)
    known = [option for option in inspect.signature(factory).parameters if option not in ("dim", "classes")]
    for option in options:
        if option not in known:
            raise ModelError(f"model {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}")
    return factory(dim, classes, **options)
