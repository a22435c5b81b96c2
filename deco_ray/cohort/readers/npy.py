"""A plain .npy array of features; arrays of Python objects are pickles and are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deco_ray.cohort.readers.raw import RawSlide, Unreadable, bag_features


def read(path: Path) -> RawSlide:
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # the header is parsed as Python text, which can fail in any way
        raise Unreadable(f"truncated or not a plain .npy array ({error})") from error
    if not isinstance(array, np.ndarray):
        raise Unreadable("an archive of several arrays; give one .npy file per slide")
    return RawSlide(bag_features(array))
