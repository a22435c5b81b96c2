"""Spherical Lloyd iterations whose result does not depend on who computes which chunk.

A chunk is always searched by one thread with the same shapes, its sums are float64, and chunks are added in
their order: any number of threads, actors or restarts gives the same bits.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import faiss
import numpy as np
from scipy.sparse import csr_matrix

from deco_ray.artefacts import write_atomically
from deco_ray.progress import bar

BLOCK = 8192  # rows summed in float32 before going to float64: bounds the rounding and stays in cache


@dataclass(frozen=True)
class Partial:
    """What one chunk adds to an iteration."""

    sums: np.ndarray  # float64 [k, d]
    counts: np.ndarray  # int64 [k]
    objective: float  # sum of cosines


@dataclass(frozen=True)
class Farthest:
    """Distinct rows of one chunk that are worst served by their centroids, worst first."""

    cosines: np.ndarray  # float32 [m]
    rows: np.ndarray  # int64 [m], row numbers of the pool
    clusters: np.ndarray  # int64 [m]
    vectors: np.ndarray  # float32 [m, d]


class Scanner(Protocol):
    """Someone who holds all chunks; both methods answer in chunk order."""

    def scan(self, centroids: np.ndarray) -> Iterator[Partial]: ...

    def farthest(self, centroids: np.ndarray, count: int) -> Iterator[Farthest]: ...


@dataclass(frozen=True)
class Iteration:
    """One line of the convergence record; the objective is the mean cosine before the centroids moved."""

    objective: float
    moved: int
    repairs: int


@dataclass(frozen=True)
class Fit:
    centroids: np.ndarray  # float32 [k, d], unit rows
    record: tuple[Iteration, ...]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """FAISS on one thread in the calling thread: how a product is split between threads changes its last bits."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def nearest(rows: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine float32 [n] and index int64 [n] of the closest centroid; -1 where a row is not finite."""  # Eq. 4
    index = faiss.IndexFlatIP(centroids.shape[1])
    index.add(np.ascontiguousarray(centroids, dtype=np.float32))
    with one_thread():
        cosines, found = index.search(np.ascontiguousarray(rows, dtype=np.float32), 1)
    return cosines[:, 0], found[:, 0]


def partial(rows: np.ndarray, centroids: np.ndarray) -> Partial:
    """Sums, counts and objective of one chunk of unit rows [n, d]."""
    k = len(centroids)
    sums, counts, objective = np.zeros(centroids.shape), np.zeros(k, np.int64), 0.0
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        cosines, clusters = nearest(block, centroids)
        members = csr_matrix(
            (np.ones(len(block), np.float32), clusters, np.arange(len(block) + 1)), shape=(len(block), k)
        )
        sums += members.T @ block  # adds rows one by one in their order
        counts += np.bincount(clusters, minlength=k)
        objective += float(cosines.sum(dtype=np.float64))
    return Partial(sums, counts, objective)


def farthest(rows: np.ndarray, centroids: np.ndarray, count: int, first_row: int) -> Farthest:
    """At most `count` distinct rows of a chunk by increasing cosine, ties by row number."""
    cosines, clusters = nearest(rows, centroids)
    chosen: list[int] = []
    seen: set[bytes] = set()
    for row in np.argsort(cosines, kind="stable"):
        content = rows[row].tobytes()
        if content not in seen:
            seen.add(content)
            chosen.append(int(row))
        if len(chosen) == count:
            break
    picked = np.array(chosen, dtype=np.int64)
    return Farthest(cosines[picked], picked + first_row, clusters[picked], rows[picked])


def unit(sums: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Directions of the sums as float32; a sum without a direction leaves its centroid where it was."""
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    return np.where(lengths > 0, sums / np.where(lengths > 0, lengths, 1.0), before).astype(np.float32)


def repair(sums: np.ndarray, counts: np.ndarray, candidates: Iterator[Farthest]) -> int:
    """Give each empty cluster the worst-served row of a cluster that has others; changes sums and counts in place."""
    found = list(candidates)
    cosines, rows, clusters, vectors = (
        np.concatenate([getattr(part, name) for part in found]) for name in ("cosines", "rows", "clusters", "vectors")
    )
    empty = list(np.flatnonzero(counts == 0))
    repaired, seen = 0, set()
    for candidate in np.lexsort((rows, cosines)):
        donor, content = clusters[candidate], vectors[candidate].tobytes()
        if repaired == len(empty):
            break
        if counts[donor] < 2 or content in seen:
            continue
        seen.add(content)
        sums[donor] -= vectors[candidate]
        counts[donor] -= 1
        sums[empty[repaired]] = vectors[candidate]
        counts[empty[repaired]] = 1
        repaired += 1
    return repaired


def lloyd(scanner: Scanner, start: np.ndarray, iterations: int, state: Path | None = None, label: str = "") -> Fit:
    """Iterate until no centroid moves or `iterations` are done; `state` saves every iteration and is resumed from."""
    fit = load_state(state, start.shape) or Fit(start, ())
    with bar(iterations, label, "iteration", initial=len(fit.record)) as shown:
        while len(fit.record) < iterations and not (fit.record and fit.record[-1].moved == 0):
            fit = step(scanner, fit)
            if state is not None:
                save_state(state, fit)
            last = fit.record[-1]
            shown.set_postfix_str(f"cosine {last.objective:.4f}, moved {last.moved}, repaired {last.repairs}", False)
            shown.update()
    return fit


def step(scanner: Scanner, fit: Fit) -> Fit:
    before = fit.centroids
    k = len(before)
    sums, counts, objective = np.zeros(before.shape), np.zeros(k, np.int64), 0.0
    for part in scanner.scan(before):
        sums += part.sums
        counts += part.counts
        objective += part.objective
    repairs, n = 0, int(counts.sum())
    if not counts.all():
        # fewer than k clusters hold one row each, so 2k candidates are enough for all empty ones
        repairs = repair(sums, counts, scanner.farthest(before, 2 * k))
    centroids = unit(sums, before)
    moved = int((centroids != before).any(axis=1).sum())
    return Fit(centroids, (*fit.record, Iteration(objective / n, moved, repairs)))


def save_state(path: Path, fit: Fit) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, centroids=fit.centroids, record=json.dumps([asdict(line) for line in fit.record]))
    write_atomically(path, buffer.getvalue())


def load_state(path: Path | None, shape: tuple[int, ...]) -> Fit | None:
    """The saved iteration if it is of this shape; a damaged one is as none, since it only saves time."""
    if path is None or not path.is_file():
        return None
    try:
        with np.load(path) as saved:
            fit = Fit(saved["centroids"], tuple(Iteration(**line) for line in json.loads(str(saved["record"]))))
    except Exception:  # a damaged archive raises whatever NumPy, zip, zlib and JSON stumble over
        return None
    return fit if fit.centroids.shape == shape else None
