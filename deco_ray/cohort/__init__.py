"""Slides and patches on disk: the cohort format, ingest, synthetic cohorts, splits, streaming."""

from deco_ray.cohort.store import Bag, Cohort

__all__ = ["Bag", "Cohort"]
