"""K-means on unit vectors behind one function: in this process, or on Ray actors; the same bits either way."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial as bind
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from deco_ray.anchors.lloyd import Farthest, Fit, Partial, Scanner, farthest, lloyd, partial
from deco_ray.anchors.start import kmeans_plus_plus, sample_rows
from deco_ray.errors import DecoError

Backend = Literal["local", "sharded", "auto"]
Rows = np.ndarray | str | Path  # [n, d], or the path of such an array saved as .npy
CHUNK = 65_536  # rows; borders depend on the data only
LOCAL_SHARE = 0.5  # of free memory a pool may fill before it is spread over the cluster
UNIT = 1e-5  # how far from 1 a length may be to count as rounding

log = logging.getLogger(__name__)


class PoolError(DecoError):
    """The rows to cluster cannot be clustered as asked."""


def fit_kmeans(
    x: Rows, k: int, seed: int = 0, iterations: int = 25, backend: Backend = "local", workers: int | None = None
) -> np.ndarray:
    """Centroids [k, d] (unit rows) of spherical K-means, bit for bit the same for every backend and worker count.

    `x` [n, d] is an array or the path of an .npy file; rows are compared by cosine.
    """
    return fit(x, k, seed=seed, iterations=iterations, backend=backend, workers=workers).centroids


def fit(
    x: Rows,
    k: int,
    *,
    seed: int = 0,
    iterations: int = 25,
    backend: Backend = "local",
    workers: int | None = None,
    state: Path | None = None,
    label: str = "",
) -> Fit:
    """As `fit_kmeans`, with the convergence record; `state` is a file to save iterations in and resume from."""
    rows = open_rows(x)
    check(rows, k, iterations)
    chosen = choose_backend(rows.nbytes) if backend == "auto" else backend
    shown = f"{label} ({chosen})" if label else ""
    with open_scanner(x, chosen, workers) as scanner:
        return lloyd(scanner, start(rows, k, seed), iterations, state, shown)


def open_rows(x: Rows) -> np.ndarray:
    rows = np.load(x, mmap_mode="r") if isinstance(x, str | Path) else np.asarray(x)
    if rows.ndim != 2 or not rows.shape[1]:
        raise PoolError(f"K-means needs rows [n, d]; got an array of shape {list(rows.shape)}")
    return rows


def borders(n: int) -> list[tuple[int, int]]:
    return [(first, min(first + CHUNK, n)) for first in range(0, n, CHUNK)]


def unit_chunk(rows: np.ndarray, first: int) -> np.ndarray:
    """Rows as unit float32 vectors, without a copy where they are so already; refuses rows without a direction."""
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        raise PoolError(
            f"row {first + int(bad[0])} to cluster is a zero vector or not finite, as are {len(bad) - 1} more of "
            f"rows {first} to {first + len(rows) - 1}; cosine needs a direction: leave such patches out"
        )
    return rows if np.abs(lengths - 1.0).max(initial=0.0) < UNIT else rows / lengths[:, None]


def check(rows: np.ndarray, k: int, iterations: int) -> None:
    """Refuse what cannot be clustered, with the numbers; looks at every row once."""
    if k < 1 or iterations < 1:
        raise PoolError(f"K-means needs at least one centroid and one iteration; got k={k}, iterations={iterations}")
    distinct: set[bytes] = set()
    for first, last in borders(len(rows)):
        for row in _until(unit_chunk(rows[first:last], first), lambda: len(distinct) >= k):
            distinct.add(row.tobytes())
    if len(distinct) < k:
        raise PoolError(
            f"K-means with k={k} needs at least {k} distinct patches, but the {len(rows)} pooled ones "
            f"hold {len(distinct)}; lower k or pool more patches"
        )


def _until(rows: np.ndarray, enough: Callable[[], bool]) -> Iterator[np.ndarray]:
    for row in rows:
        if enough():
            return
        yield row


def start(rows: np.ndarray, k: int, seed: int) -> np.ndarray:
    """The shared k-means++ start [k, d]."""
    return kmeans_plus_plus(unit_chunk(rows[sample_rows(len(rows), k, seed)], 0), k, seed)


def choose_backend(pool_bytes: int) -> Literal["local", "sharded"]:
    """`local` while the pool fills at most half of this machine's free memory; says what it picked and why."""
    free = free_memory()
    chosen: Literal["local", "sharded"] = "local" if pool_bytes <= LOCAL_SHARE * free else "sharded"
    log.info("k-means backend %s: pool of %.1f GB, %.1f GB of memory free here", chosen, pool_bytes / 1e9, free / 1e9)
    return chosen


def free_memory() -> int:
    """Bytes this process may still take: of the machine, or of its container where that allows less."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max": no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free


@contextlib.contextmanager
def open_scanner(x: Rows, backend: Literal["local", "sharded"], workers: int | None) -> Iterator[Scanner]:
    if backend == "local":
        with LocalScanner(open_rows(x), workers) as local:
            yield local
    elif backend == "sharded":
        from deco_ray.anchors.sharded import ShardedScanner  # only this backend needs Ray

        with ShardedScanner(x, workers) as sharded:
            yield sharded
    else:
        raise PoolError(f"k-means backend {backend!r} is none of local, sharded, auto")


class LocalScanner:
    """All chunks in this process; each is searched by one of `threads` threads (none: one per CPU)."""

    def __init__(self, rows: np.ndarray, threads: int | None = None) -> None:
        self.chunks = [(first, unit_chunk(rows[first:last], first)) for first, last in borders(len(rows))]
        self.threads = ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)))

    def __enter__(self) -> LocalScanner:
        return self

    def __exit__(self, *error: Any) -> None:
        self.threads.shutdown(cancel_futures=True)

    def scan(self, centroids: np.ndarray) -> Iterator[Partial]:
        return self.threads.map(bind(scan_chunk, centroids), self.chunks)

    def farthest(self, centroids: np.ndarray, count: int) -> Iterator[Farthest]:
        return self.threads.map(bind(farthest_chunk, centroids, count), self.chunks)


Chunk = tuple[int, np.ndarray]  # number of the first row, unit rows


def scan_chunk(centroids: np.ndarray, chunk: Chunk) -> Partial:
    return partial(chunk[1], centroids)


def farthest_chunk(centroids: np.ndarray, count: int, chunk: Chunk) -> Farthest:
    return farthest(chunk[1], centroids, count, chunk[0])


def shares(n: int, workers: int) -> Sequence[list[tuple[int, int]]]:
    """Chunk borders of each worker, dealt in turn."""
    return [borders(n)[worker::workers] for worker in range(workers)]
