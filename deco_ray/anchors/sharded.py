"""K-means on Ray: actors hold fixed chunks of the pool and answer for each chunk; the driver adds in chunk order.

An actor is its chunks and nothing else: one that dies is started again elsewhere, reads the same rows and gives
the same answer, so a crash costs time and changes no bit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray

from deco_ray.anchors.kmeans import Rows, borders, farthest_chunk, open_rows, scan_chunk, shares, unit_chunk
from deco_ray.anchors.lloyd import Farthest, Partial
from deco_ray.cluster import start_ray
from deco_ray.errors import StageError

DEATHS = 10  # of one worker: by then it is its own work that kills it
Source = tuple[int, int, Any]  # first row, one past the last, path of the .npy file or reference to the rows


class ChunkWorker:
    """One actor: some chunks of the pool, mapped from its file, one thread."""

    def __init__(self, sources: list[Source]) -> None:
        self.chunks = [(first, unit_chunk(_read(first, last, where), first)) for first, last, where in sources]

    def scan(self, centroids: np.ndarray) -> list[Partial]:
        return [scan_chunk(centroids, chunk) for chunk in self.chunks]

    def farthest(self, centroids: np.ndarray, count: int) -> list[Farthest]:
        return [farthest_chunk(centroids, count, chunk) for chunk in self.chunks]

    def process(self) -> dict[str, Any]:
        """Node, process id, peak resident memory and bytes of the chunks held."""
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        held = sum(rows.nbytes for _, rows in self.chunks)
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "pid": os.getpid(), "peak": int(peak.split()[1]) * 1024, "chunks": held}


def _read(first: int, last: int, where: Any) -> np.ndarray:
    return open_rows(where)[first:last] if isinstance(where, str) else ray.get(where)


class ShardedScanner:
    """All chunks of `x` on `workers` actors (none: one for each CPU of the cluster, at most one for each chunk)."""

    def __init__(self, x: Rows, workers: int | None = None) -> None:
        start_ray(include_dashboard=False)
        n = len(open_rows(x))
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = min(workers or cpus, len(borders(n)))
        # more workers than CPUs share them: asking for more than the cluster has would wait for ever
        share = 1 / math.ceil(count / cpus)
        actor: Any = ray.remote(ChunkWorker).options(
            num_cpus=share, max_restarts=DEATHS, max_task_retries=DEATHS, scheduling_strategy="SPREAD"
        )
        # kept: an actor that starts again needs its rows again
        self.sources = [[_source(x, *border) for border in dealt] for dealt in shares(n, count)]
        self.workers = [actor.remote(sources) for sources in self.sources]
        self.processes()  # all have started and read their rows

    def __enter__(self) -> ShardedScanner:
        return self

    def __exit__(self, *error: Any) -> None:
        for worker in self.workers:
            ray.kill(worker)

    def processes(self) -> list[dict[str, Any]]:
        return answers(worker.process.remote() for worker in self.workers)

    def scan(self, centroids: np.ndarray) -> Iterator[Partial]:
        shared = ray.put(centroids)
        return self._in_order(answers(worker.scan.remote(shared) for worker in self.workers))

    def farthest(self, centroids: np.ndarray, count: int) -> Iterator[Farthest]:
        shared = ray.put(centroids)
        return self._in_order(answers(worker.farthest.remote(shared, count) for worker in self.workers))

    def _in_order(self, answers: list[list[Any]]) -> Iterator[Any]:
        """Undo the dealing of `shares`: chunk i is answer i // workers of worker i % workers."""
        for chunk in range(sum(map(len, answers))):
            yield answers[chunk % len(answers)][chunk // len(answers)]


def answers(asked: Iterable[ray.ObjectRef]) -> list[Any]:
    """What the workers answer; one that keeps dying is given up, since it would die again."""
    try:
        return ray.get(list(asked))
    except ray.exceptions.RayActorError as error:
        raise StageError(
            f"a K-means worker died more than {DEATHS} times, probably out of memory; lower anchors.pool_per_anchor "
            "or use larger nodes"
        ) from error


def _source(x: Rows, first: int, last: int) -> Source:
    """Rows in a file are mapped by the actor that needs them; rows in memory travel through the object store."""
    if isinstance(x, str | Path):
        return first, last, str(Path(x).resolve())
    return first, last, ray.put(np.asarray(x)[first:last])
