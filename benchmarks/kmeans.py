"""K-means on Ray actors against faiss.Kmeans, and assignment from Parquet against a plain product in memory.

    python benchmarks/kmeans.py [--quick]

Both sides cluster the same pool from the same start on the same number of threads, in turns within one run; the
ratio is that of the medians. The sharded time includes looking at every row and the k-means++ start; starting the
actors is shown apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("DECO_RAY_PROGRESS", "0")

import faiss
import numpy as np
import ray

from deco_ray.anchors import Anchors, kmeans
from deco_ray.anchors.lloyd import Fit, lloyd
from deco_ray.anchors.sharded import ShardedScanner
from deco_ray.anchors.stage import assign_slides
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.keys import generator

DIM, K, ITERATIONS, WORKERS = 512, 64, 20, 2
SLIDE = 4000  # patches
ASSIGNED = 1_280_000  # patches: the training slides of a middling cohort; smaller pools are streamed several times
MB = 2**20


def write_pool(path: Path, rows: int) -> None:
    """Unit rows around 200 overlapping directions of a narrow cone, as patch features are."""
    rng = generator(0, "benchmark pool")
    directions = 0.5 + rng.normal(size=(200, DIM)).astype(np.float32)
    pool = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, DIM))
    for first in range(0, rows, kmeans.CHUNK):
        part = pool[first : first + kmeans.CHUNK]
        noisy = 6 * rng.standard_normal(part.shape, dtype=np.float32) + directions[rng.integers(0, 200, len(part))]
        part[:] = noisy / np.linalg.norm(noisy, axis=1, keepdims=True)


def write_cohort(path: Path, pool: np.ndarray) -> Cohort:
    with CohortWriter(path, CohortMeta(name="benchmark", classes=("a", "b"), dim=DIM)) as writer:
        for index, first in enumerate(range(0, len(pool), SLIDE)):
            writer.add(SlideFeatures(f"s{index:04d}", f"s{index:04d}", index % 2, pool[first : first + SLIDE]))
    return Cohort.open(str(path))


def timed(work: Callable[[], object]) -> tuple[float, object]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def with_faiss(x: np.ndarray, start: np.ndarray) -> np.ndarray:
    faiss.omp_set_num_threads(WORKERS)
    clustering = faiss.Kmeans(DIM, K, niter=ITERATIONS, spherical=True, max_points_per_centroid=len(x), seed=1)
    clustering.train(x, init_centroids=start)
    return clustering.centroids


def with_ray(path: Path, scanner: ShardedScanner) -> np.ndarray:
    rows = kmeans.open_rows(path)
    kmeans.check(rows, K, ITERATIONS)
    fit: Fit = lloyd(scanner, kmeans.start(rows, K, seed=0), ITERATIONS)
    assert len(fit.record) == ITERATIONS, "converged early: the times would not compare"
    return fit.centroids


def mean_cosine(x: np.ndarray, centroids: np.ndarray) -> float:
    total = 0.0
    for first, last in kmeans.borders(len(x)):
        total += float((x[first:last] @ centroids.T).max(axis=1).sum(dtype=np.float64))
    return total / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the pool")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = 128_000 if options.quick else 640_000
    ray.init(
        address="local",
        num_cpus=WORKERS,
        object_store_memory=600 * MB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pool.npy"
        write_pool(path, rows)
        x = np.load(path)
        start = kmeans.start(x, K, seed=0)
        ours, theirs = [], []
        starting, scanner = timed(lambda: ShardedScanner(path, WORKERS))
        with scanner:
            for _ in range(options.repeats):
                seconds, reference = timed(lambda: with_faiss(x, start))
                theirs.append(seconds)
                seconds, sharded = timed(lambda: with_ray(path, scanner))
                ours.append(seconds)
            beyond = max(process["peak"] - process["chunks"] for process in scanner.processes())
        path.unlink()
        objectives = mean_cosine(x, sharded), mean_cosine(x, reference)
        cohort = write_cohort(Path(folder) / "cohort", x)
        streamed, plain = assignment(cohort, x, Anchors.of(sharded, sharded[:32]), options.repeats)
    ray.shutdown()
    ratio = statistics.median(ours) / statistics.median(theirs)
    gap = abs(objectives[0] - objectives[1]) / abs(objectives[1])
    speed = statistics.median(plain) / statistics.median(streamed)
    print(
        f"pool {rows:,} x {DIM}, K={K}, {ITERATIONS} iterations, {WORKERS} threads, {options.repeats} repeats in turns"
    )
    print(f"{'':34}{'ours':>12}{'reference':>12}{'ratio':>9}{'asked':>10}")
    for name, mine, other, value, asked in (
        ("K-means on 2 actors, s", statistics.median(ours), statistics.median(theirs), ratio, "<= 1.3"),
        ("mean cosine (gap)", *objectives, gap, "<= 0.001"),
        ("assignment, s (speed)", statistics.median(streamed), statistics.median(plain), speed, ">= 0.3"),
    ):
        print(f"{name:34}{mine:>12.3f}{other:>12.3f}{value:>9.4f}{asked:>10}")
    print(f"starting the actors: {starting:.1f} s; memory of a worker beyond its chunks: {beyond / MB:.0f} MB (<= 300)")
    print(json.dumps({"sharded_vs_faiss_time": ratio, "objective_gap": gap, "assign_vs_gemm": speed}))


def assignment(cohort: Cohort, x: np.ndarray, anchors: Anchors, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of assigning every patch from Parquet on Ray Data, and of one product and argmax in memory."""
    passes = ASSIGNED // len(x)
    slides = cohort.slides["slide_id"].tolist() * passes
    streamed, plain = [], []
    for repeat in range(repeats + 1):
        seconds, found = timed(lambda: list(assign_slides(cohort, slides, anchors)))
        product, nearest = timed(lambda: [(x @ anchors.anchors.T).argmax(axis=1) for _ in range(passes)])
        if repeat:  # the first round starts processes and fills the page cache
            streamed.append(seconds)
            plain.append(product)
    assert (np.concatenate([assignment for _, _, assignment in found]) == np.concatenate(nearest)).mean() > 0.9999
    return streamed, plain


if __name__ == "__main__":
    main()
