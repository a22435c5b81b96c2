"""Aggregators by name, all behind one small protocol."""

from deco_ray.models.protocol import Aggregator, Partner, SoftmaxPooling, Visit
from deco_ray.models.registry import create_model, model_names

__all__ = ["Aggregator", "Partner", "SoftmaxPooling", "Visit", "create_model", "model_names"]
