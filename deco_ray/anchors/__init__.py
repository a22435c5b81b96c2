"""Anchors: the pool of training patches, K-means on it, matched normal prototypes, the anchor of every patch."""

from deco_ray.anchors.artefact import Anchors
from deco_ray.anchors.kmeans import fit_kmeans

__all__ = ["Anchors", "anchor_inputs", "ensure_anchors", "fit_kmeans", "load_assignments"]


def __getattr__(name: str):
    # the stage needs Ray Data and torch; K-means workers and readers of anchors do not
    if name in ("anchor_inputs", "ensure_anchors"):
        from deco_ray.anchors import stage

        return getattr(stage, name)
    if name == "load_assignments":
        from deco_ray.anchors.assignments import load_assignments

        return load_assignments
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
