"""Aggregators by name, all behind one small protocol."""

from deco_ray.models.protocol import Aggregator, Partner, SoftmaxPooling, Visit, parameter_count
from deco_ray.models.registry import create_model, display_name, model_names

__all__ = [
    "Aggregator",
    "Partner",
    "SoftmaxPooling",
    "Visit",
    "create_model",
    "display_name",
    "model_names",
    "parameter_count",
]
