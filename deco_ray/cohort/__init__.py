"""Slides and patches on disk: the cohort format, ingest, synthetic cohorts, splits, streaming."""

import importlib
from typing import Any

from deco_ray.cohort.store import Bag, Cohort

__all__ = ["Bag", "Cohort", "ingest", "synthesize"]

# opening a cohort must not load Ray, so what makes one is imported when first asked for
_LAZY = {"ingest": "deco_ray.cohort.ingestion", "synthesize": "deco_ray.cohort.synthetic"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
