"""deco_ray: DeCo-MIL for long-tailed whole-slide images, trained, tuned and compared on Ray."""

__version__ = "0.1.0"
