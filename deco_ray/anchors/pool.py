"""The clustering pool: which patches of which training slide, decided by sizes and keys before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deco_ray.cohort.store import Bag
from deco_ray.errors import CohortError
from deco_ray.keys import generator

ANCHORS, NORMALS = "anchors", "normals"  # the two pools: all training slides, normal-class training slides


def quotas(sizes: Mapping[str, int], cap: int) -> dict[str, int]:
    """Patches to draw of each slide: equal shares, what small slides leave goes to the others; sums to min(cap, all).

    The keys come out sorted, the last few patches go to the first slides that can give one more.
    """
    ordered = sorted(sizes)
    available = np.array([sizes[slide] for slide in ordered], dtype=np.int64)
    share = _share(available, cap)
    drawn = np.minimum(available, share)
    left = min(cap, int(available.sum())) - int(drawn.sum())
    drawn[np.flatnonzero(available > share)[:left]] += 1
    return {slide: int(count) for slide, count in zip(ordered, drawn)}


def _share(available: np.ndarray, cap: int) -> int:
    """The largest equal share that stays within the cap when no slide gives more than it has."""
    low, high = 0, int(available.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(available, middle).sum()) <= cap:
            low = middle
        else:
            high = middle - 1
    return low


def draw(seed: int, pool: str, slide_id: str, n_patches: int, quota: int) -> np.ndarray:
    """Ascending patch indices of one slide, without replacement; depends on these arguments only."""
    chosen = generator(seed, "pool", pool, slide_id).choice(n_patches, quota, replace=False, shuffle=False)
    return np.sort(chosen)


@dataclass(frozen=True)
class Draw:
    """What a Ray Data task does with one training slide: its rows for each pool that wants some."""

    seed: int
    plan: Mapping[str, Mapping[str, int]]  # pool -> slide -> quota

    def __call__(self, bag: Bag) -> dict[str, np.ndarray]:
        features = bag.features.numpy()
        # a zero vector has no direction: dividing by its length gave NaN. All patches count, they get assigned later
        bad = np.flatnonzero(~np.isfinite(features.sum(axis=1)))
        if len(bad):
            raise CohortError(
                f"slide {bag.slide_id}: patch {int(bad[0])} is a zero vector or not finite, as are {len(bad) - 1} more "
                f"of its {len(features)} patches; extract its features again and ingest the cohort again"
            )
        wanted = {pool: quota[bag.slide_id] for pool, quota in self.plan.items() if bag.slide_id in quota}
        return {
            pool: features[draw(self.seed, pool, bag.slide_id, len(features), quota)] for pool, quota in wanted.items()
        }
