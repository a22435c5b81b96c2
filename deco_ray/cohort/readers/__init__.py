"""Feature files as other tools write them: one module per format, each a function `path -> slide`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deco_ray.cohort.readers import clam, npy, stamp, torch_file, trident
from deco_ray.cohort.readers.raw import RawSlide, Unreadable

READERS: dict[str, Callable[[Path], RawSlide]] = {
    "clam": clam.read,
    "trident": trident.read,
    "stamp": stamp.read,
    "pt": torch_file.read,
    "npy": npy.read,
}

__all__ = ["READERS", "RawSlide", "Unreadable"]
