"""STAMP's <slide>.h5: `feats`, and coordinates in microns (current files) or in pixels of the tile (older ones).

A file does not say the pixel size of level 0, only that of the tiles: tile_size_um / tile_size_px. Coordinates
come out in tile pixels, which are level-0 pixels where tiles were cut at the scanner's own resolution.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deco_ray.cohort.readers import hdf5
from deco_ray.cohort.readers.raw import RawSlide, Unreadable, bag_features, number, pixel_coords

TILE_PX = 224.0  # STAMP's tiles before the size was written down
MICRONS = {"um", "µm", "μm", "micron", "microns", "micrometer", "micrometre"}
PIXELS = {"px", "pixel", "pixels"}


def read(path: Path) -> RawSlide:
    with hdf5.opened(path) as file:
        features = bag_features(hdf5.dataset(file, "feats", "features")[()])
        coords, attributes = hdf5.array(file, "coords"), hdf5.numbers(file)
        unit = hdf5.text(file, "unit").strip().lower()
    tile_px = number(attributes.get("tile_size_px")) or TILE_PX
    tile_um = number(attributes.get("tile_size_um"))
    if unit in MICRONS:
        tile_um = tile_um or number(attributes.get("tile_size"))
    if unit and unit not in MICRONS | PIXELS:
        raise Unreadable(f"coords have the unit {unit!r}; expected um or px")
    if unit in PIXELS or (not unit and tile_um is None):
        size = number(attributes.get("tile_size_px")) or number(attributes.get("tile_size")) or _stride(coords)
        return RawSlide(features, pixel_coords(coords, len(features)), size)
    if tile_um is None:
        raise Unreadable("coords are in microns but the file has no tile_size_um to turn them into pixels")
    return RawSlide(features, pixel_coords(coords, len(features), tile_px / tile_um), tile_px)


def _stride(coords: np.ndarray | None) -> float | None:
    """The smallest step between tiles, for files that do not state the tile's size."""
    if coords is None or coords.ndim != 2 or not len(coords):
        return None
    steps = np.concatenate([np.diff(np.unique(coords[:, axis])) for axis in range(coords.shape[1])])
    return float(steps.min()) if len(steps) else None
