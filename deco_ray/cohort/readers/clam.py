"""CLAM's h5_files: features and level-0 coords; patch geometry only in the sibling patches folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from deco_ray.cohort.readers import hdf5
from deco_ray.cohort.readers.raw import (
    COORDINATE_LIMIT,
    RawSlide,
    Unreadable,
    bag_features,
    number,
    pixel_coords,
    whole_number,
)


def read(path: Path) -> RawSlide:
    with hdf5.opened(path) as file:
        features = bag_features(hdf5.dataset(file, "features", "feats")[()])
        coords = pixel_coords(hdf5.array(file, "coords"), len(features))
    size, width, height = geometry(path)
    return RawSlide(features, coords, size, width, height)


Geometry = tuple[float | None, int | None, int | None]


def geometry(path: Path) -> Geometry:
    """Patch side and slide width and height in level-0 pixels, from patches/<slide>.h5 where CLAM left it."""
    for folder in (path.parent.parent, path.parent.parent.parent):
        patches = folder / "patches" / f"{path.stem}.h5"
        if patches.is_file():
            break
    else:
        return None, None, None
    try:
        with hdf5.opened(patches) as file:
            attributes = hdf5.numbers(hdf5.dataset(file, "coords"))
    except Unreadable as error:
        raise Unreadable(f"{patches.name} in {patches.parent}: {error}") from error
    patch_size, level = number(attributes.get("patch_size")), _pair(attributes.get("level_dim"))
    downsample = _pair(attributes.get("downsample", 1.0))
    custom = number(attributes.get("custom_downsample")) or 1.0  # old CLAM: shrunk once more after reading
    if downsample is None:
        return None, None, None
    side = None if patch_size is None else number(patch_size * custom * float(downsample[0]))
    # both sizes CLAM records are of the patches' level
    width, height = (None, None) if level is None else map(whole_number, level * downsample)
    return side, width, height


def _pair(value: Any) -> np.ndarray | None:
    """Two positive numbers from an attribute that holds one or two; anything else counts as not being there."""
    found = np.asarray([] if value is None else value, dtype=np.float64).reshape(-1)[:2]
    usable = found.size > 0 and bool(np.all((found > 0) & (found <= COORDINATE_LIMIT)))  # NaN fails too
    return np.broadcast_to(found, 2) if usable else None
