"""Where K-means starts: k-means++ on a sample of the pool that is fixed by its key, one for all backends."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from deco_ray.keys import generator

SAMPLE_PER_CENTROID = 256  # enough to seed with; the iterations themselves use every row
LARGEST_SAMPLE = 65_536
TRIALS = 16  # draws a step; with the usual handful, noisy but separate groups are missed now and then
SAME = 1e-6  # 1 - cosine below this is rounding: the row is covered already


def sample_rows(n: int, k: int, seed: int) -> np.ndarray:
    """Ascending row numbers of the starting sample: all rows of a small pool."""
    size = min(n, LARGEST_SAMPLE, max(8192, k * SAMPLE_PER_CENTROID))
    return np.sort(generator(seed, "k-means sample").choice(n, size, replace=False, shuffle=False))


def kmeans_plus_plus(sample: np.ndarray, k: int, seed: int) -> np.ndarray:
    """k rows [k, d] of a sample of unit rows, each drawn by squared distance to those before it, best of a few draws.

    Squared distance of unit vectors is 2 - 2 cos.
    """
    rng = generator(seed, "k-means++")
    chosen = [int(rng.integers(len(sample)))]
    with threadpool_limits(1):  # how BLAS splits a product between threads changes its last bits
        closest = _distance(sample, sample[chosen])[:, 0]
        while len(chosen) < k:
            cumulated = np.cumsum(closest, dtype=np.float64)
            if cumulated[-1] == 0.0:  # every row of the sample is covered: the first repair moves this one
                chosen.append(int(rng.integers(len(sample))))
                continue
            draws = np.searchsorted(cumulated, rng.random(TRIALS) * cumulated[-1], side="right")
            draws = np.minimum(draws, len(sample) - 1)
            remaining = np.minimum(closest[:, None], _distance(sample, sample[draws]))
            best = int(remaining.sum(axis=0, dtype=np.float64).argmin())
            chosen.append(int(draws[best]))
            closest = remaining[:, best]
    return sample[chosen]


def _distance(sample: np.ndarray, to: np.ndarray) -> np.ndarray:
    distance = np.float32(1.0) - sample @ to.T
    distance[distance < SAME] = 0.0
    return distance
