"""Patches painted into an image array at once: thousands of patches cost one pass, not one drawing call each."""

from __future__ import annotations

import numpy as np

from deco_ray.errors import DecoError

LONGEST = 1200  # pixels of the raster's longer side at most
PATCH_PIXELS = 6  # a patch needs no more: it has one value


def patch_size_of(coords: np.ndarray, stated: float | None, slide_id: str) -> float:
    """The stated patch size, or the smallest step between neighbouring coordinates where none is stated."""
    if stated is not None and np.isfinite(stated) and stated > 0:
        return float(stated)
    steps = [np.diff(np.unique(coords[:, axis])) for axis in (0, 1)]
    smallest = [step.min() for step in steps if len(step)]
    if not smallest:
        raise DecoError(
            f"slide {slide_id}: patch size is not known and cannot be told from one patch; set it at ingest"
        )
    return float(min(smallest))


class PatchRaster:
    """Where every patch lies in a small image of the tissue; overlapping patches share pixels."""

    def __init__(self, coords: np.ndarray, patch_size: float) -> None:
        corner = np.asarray(coords, dtype=float)
        self.low = corner.min(0)
        self.high = corner.max(0) + patch_size
        scale = min(LONGEST / float((self.high - self.low).max()), PATCH_PIXELS / patch_size)
        self.shape = tuple(np.maximum(1, np.ceil((self.high - self.low) * scale - 1e-9).astype(int))[::-1])  # [h, w]
        # borders rounded, not sizes: neighbours on a grid touch without gaps or overlap
        first = np.minimum(np.floor((corner - self.low) * scale + 0.5).astype(int), np.array(self.shape[::-1]) - 1)
        last = np.maximum(first + 1, np.floor((corner + patch_size - self.low) * scale + 0.5).astype(int))
        pixels, owners = [], []
        reach = (last - first).max(0)
        for dx in range(reach[0]):
            for dy in range(reach[1]):
                x, y = first[:, 0] + dx, first[:, 1] + dy
                owner = np.flatnonzero((x < last[:, 0]) & (y < last[:, 1]) & (x < self.shape[1]) & (y < self.shape[0]))
                pixels.append(y[owner] * self.shape[1] + x[owner])
                owners.append(owner)
        self.pixel, self.owner = np.concatenate(pixels), np.concatenate(owners)

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """For imshow: left, right, bottom, top in level-0 pixels."""
        return self.low[0], self.high[0], self.high[1], self.low[1]

    def mean(self, values: np.ndarray) -> np.ndarray:
        """[h, w]: the mean of the patches over each pixel, NaN where there is none."""
        size = self.shape[0] * self.shape[1]
        total = np.bincount(self.pixel, np.asarray(values, dtype=float)[self.owner], minlength=size)
        count = np.bincount(self.pixel, minlength=size)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan).reshape(self.shape)

    def last(self, values: np.ndarray) -> np.ndarray:
        """[h, w] for values that have no mean (anchor numbers): the later patch wins, NaN where there is none."""
        image = np.full(self.shape[0] * self.shape[1], np.nan)
        order = np.argsort(self.owner, kind="stable")
        image[self.pixel[order]] = np.asarray(values, dtype=float)[self.owner[order]]
        return image.reshape(self.shape)
