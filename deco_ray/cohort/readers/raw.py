"""A slide as some tool wrote it, brought to one shape: features [N, d], coordinates [N, 2] in level-0 pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

COORDINATE_LIMIT = 2**31 - 1  # stored as int32


def printable(text: object) -> str:
    """A name or reason as UTF-8 can hold it; bytes that are none become `\\udcff`, say: no slide id has a backslash."""
    return str(text).encode("utf-8", "backslashreplace").decode()


class Unreadable(Exception):
    """Why a feature file cannot be used; ingest adds the slide and the file."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable(reason))  # it can quote damaged names and bytes, and is written to tables


@dataclass(frozen=True)
class RawSlide:
    features: np.ndarray  # [N, d] float32 or float16
    coords: np.ndarray | None = None  # [N, 2] int32, top-left corner
    patch_size_level0: float | None = None
    level0_width: int | None = None
    level0_height: int | None = None


def bag_features(array: np.ndarray) -> np.ndarray:
    """Features [N, d], float16 as given, any other float as float32; a leading batch axis of one is dropped."""
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim == 1 and len(array):
        raise Unreadable(f"shape {array.shape} is a slide-level feature, not a bag of patches; give patch features")
    if array.size == 0:
        raise Unreadable("no patches (empty bag): the slide has no tissue or its extraction failed")
    if array.ndim != 2:
        raise Unreadable(f"features have shape {array.shape}; expected (patches, dimension)")
    if array.dtype.kind != "f":
        raise Unreadable(f"features are {array.dtype}; expected floating-point numbers")
    return array if array.dtype in (np.float32, np.float16) else array.astype(np.float32)


def pixel_coords(array: np.ndarray | None, patches: int, scale: float = 1.0) -> np.ndarray | None:
    """Coordinates as int32 [N, 2], rounded where a tool wrote floats; `scale` turns their unit into pixels."""
    if array is None:
        return None
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or array.shape[1] != 2:
        raise Unreadable(f"coords have shape {array.shape}; expected (patches, 2)")
    if len(array) != patches:
        raise Unreadable(f"{patches} features but {len(array)} coords")
    if array.dtype.kind == "f" or scale != 1.0:
        array = np.rint(array.astype(np.float64) * scale)
    if not np.all(np.abs(array) <= COORDINATE_LIMIT):  # NaN fails too
        raise Unreadable("coords are not finite or beyond 2^31 pixels")
    return array.astype(np.int32)


def number(value: Any) -> float | None:
    """A positive number from an attribute; none where there is no such (TRIDENT's text `None` is never handed on)."""
    try:
        found = float(np.asarray(value).reshape(-1)[0])
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    return found if math.isfinite(found) and found > 0 else None


def whole_number(value: Any) -> int | None:
    """A positive number of pixels from an attribute; none where there is no such or it is beyond 2^31."""
    found = number(value)
    return round(found) if found is not None and 0.5 < found <= COORDINATE_LIMIT else None


def check_values(features: np.ndarray) -> None:
    """Refuses NaN, Inf and all-zero patches, which have no direction (Eq. 1)."""
    wide = features.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.vecdot(wide, wide)  # one pass over the data in the ordinary case
    if not np.all(np.isfinite(lengths)):
        bad = np.flatnonzero(~np.isfinite(wide).all(axis=1))
        if len(bad):
            raise Unreadable(f"NaN or Inf in {len(bad)} of {len(wide)} patches, first in patch {bad[0]}")
        raise Unreadable("feature values are too large for float32 arithmetic")
    zero = np.flatnonzero(lengths == 0)
    if len(zero):
        raise Unreadable(f"{len(zero)} of {len(wide)} patches are all zero, first patch {zero[0]}")
