"""From a model's name in the configuration to the model."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator

# name -> (module, class or function, name in tables); imported when first asked for
REGISTRY = {
    "meanpool": ("pooling", "MeanPool", "Mean pooling"),
    "maxpool": ("pooling", "MaxPool", "Max pooling"),
    "abmil": ("abmil", "ABMIL", "AB-MIL"),
    "clam_sb": ("clam", "CLAMSB", "CLAM-SB"),
    "clam_mb": ("clam", "CLAMMB", "CLAM-MB"),
    "dsmil": ("dsmil", "DSMIL", "DS-MIL"),
    "transmil": ("transmil", "TransMIL", "TransMIL"),
    "ilra": ("ilra", "ILRA", "ILRA-MIL"),
    "mhim": ("mhim", "mhim", "MHIM-MIL"),
    "mico": ("mico", "MiCo", "MiCo-MIL"),
    "amdmil": ("amdmil", "AMDMIL", "AMD-MIL"),
    "wikg": ("wikg", "WiKG", "WiKG-MIL"),
    "mde": ("mde", "MDE", "MDE-MIL"),
}


def model_names() -> list[str]:
    return list(REGISTRY)


def create_model(name: str, dim: int, classes: int, **options: Any) -> Aggregator:
    module, attribute, _ = entry(name)
    factory = getattr(importlib.import_module(f"deco_ray.models.{module}"), attribute)
    known = [option for option in inspect.signature(factory).parameters if option not in ("dim", "classes")]
    for option in options:
        if option not in known:
            raise ModelError(f"model {name!r} has no option {option!r}; its options: {', '.join(known) or 'none'}")
    return factory(dim, classes, **options)


def display_name(name: str, options: Mapping[str, Any] | None = None) -> str:
    """The name for tables and figures; it says where options make another method of it."""
    options = options or {}
    shown = entry(name)[2]
    if name == "abmil" and options.get("gated"):
        return f"{shown} (gated)"
    if name == "mhim" and options.get("variant") == "milbaseline":
        return f"{shown} (MIL_BASELINE)"
    if name == "mhim" and options.get("base") == "transmil":
        return f"{shown} (TransMIL)"
    if name == "mde" and not options.get("text_embeddings"):
        return f"{shown} (no text)"
    return shown


def entry(name: str) -> tuple[str, str, str]:
    if name not in REGISTRY:
        near = difflib.get_close_matches(name, REGISTRY, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ModelError(f"unknown model {name!r}{hint} Known: {', '.join(REGISTRY)}")
    return REGISTRY[name]
