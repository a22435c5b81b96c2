"""One judge scoring slides of a cohort, chunk by chunk, with what is finished kept on disk."""

from __future__ import annotations

import functools
import io
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from deco_ray.anchors.artefact import Anchors
from deco_ray.anchors.assignments import load_assignments
from deco_ray.artefacts import write_atomically
from deco_ray.cohort.store import Bag, Cohort, shown
from deco_ray.config import CounterfactualSection
from deco_ray.counterfactual.effects import Contributions, contributions, log_prior
from deco_ray.counterfactual.replacements import Replacements, replacements
from deco_ray.counterfactual.table import TABLE, join_rows, slide_rows
from deco_ray.errors import DecoError, StageError
from deco_ray.models.saved import load_model

CHUNK_PATCHES, CHUNK_SLIDES = 16_384, 32  # what a killed scorer loses at most, and how finely slides are shared out
ATTEMPTS = 10  # a chunk whose process died this often is the cause itself (out of memory)


@dataclass(frozen=True)
class Chunk:
    """Slides scored together; number and members depend on the slides only, never on who scores them."""

    number: int
    slide_ids: tuple[str, ...]


def plan_chunks(cohort: Cohort, slide_ids: Sequence[str]) -> list[Chunk]:
    """Largest slides first, so that the last chunks are short and all scorers finish together."""
    patches = dict(zip(cohort.slides["slide_id"], cohort.slides["n_patches"].astype(int)))
    chunks: list[list[str]] = []
    room = 0
    for slide in sorted(slide_ids, key=lambda slide: (-patches[slide], slide)):
        if not chunks or patches[slide] > room or len(chunks[-1]) == CHUNK_SLIDES:
            chunks.append([])
            room = CHUNK_PATCHES
        chunks[-1].append(slide)
        room -= patches[slide]
    return [Chunk(number, tuple(slides)) for number, slides in enumerate(chunks)]


@functools.lru_cache(maxsize=4)
def opened(uri: str, checksum: str) -> Cohort:
    cohort = Cohort.open(uri)
    if cohort.checksum != checksum:
        raise StageError(
            f"the cohort at {shown(uri)} is no longer the one this scoring began with; run the command again"
        )
    return cohort


@dataclass(frozen=True)
class ScoringJob:
    """Everything a scorer needs; small enough to travel inside an actor's creation, so no restart can miss it."""

    uri: str  # of the cohort
    checksum: str  # of the cohort
    anchors: Path  # artefact folder
    judge: Path  # artefact folder
    section: CounterfactualSection
    train_counts: tuple[int, ...]
    work: Path  # folder of finished chunks, on storage that all nodes share
    threads: int = 1
    gpu: bool = False

    @property
    def cohort(self) -> Cohort:
        return opened(self.uri, self.checksum)

    def part(self, chunk: Chunk) -> Path:
        return self.work / f"chunk-{chunk.number:06d}.parquet"

    def attempts(self, chunk: Chunk) -> Path:
        return self.work / f"chunk-{chunk.number:06d}.attempts"


@dataclass(frozen=True)
class Timing:
    """When a chunk was scored (seconds of the epoch) and for how long the judge really worked."""

    slides: int
    started: float
    ended: float
    busy: float


class SlideScorer:
    """A judge in memory. Two threads may score at once: while one holds the judge the other reads its next bag."""

    def __init__(self, job: ScoringJob) -> None:
        self.job = job
        self._judge_free = threading.Lock()

    @functools.cached_property
    def _judge(self):
        # at first use, not in the constructor: an unreadable judge is then an error of the work, with its message
        model, _ = load_model(self.job.judge, self.job.cohort.dim)
        if self.job.gpu:
            model = model.cuda()
        anchors = Anchors.load(self.job.anchors)
        rows = Replacements.prepare(model, replacements(anchors, self.job.section.construction))
        return model, rows, anchors, load_assignments(self.job.anchors), log_prior(self.job.train_counts)

    def score(self, bag: Bag) -> Contributions:
        model, rows, anchors, assignments, prior = self._judge
        assignment = assignments.get(bag.slide_id)
        if assignment is None:
            assignment = anchors.assign(bag.features)
        section = self.job.section
        found = contributions(
            model, bag.features, assignment, rows, prior, bag.label, section.tau, section.method, section.memory_cap_mb
        )
        if not np.isfinite(found.effects).all():
            raise StageError("the judge's output is not finite; train it again with a smaller learning rate")
        return found

    def score_chunk(self, chunk: Chunk) -> Timing:
        """Score the chunk's slides and put their rows on disk; doing it twice leaves the same file."""
        self._count_attempt(chunk)
        torch.set_num_threads(self.job.threads)  # per thread; on a CPU it decides the order of sums
        started, busy, tables = time.time(), 0.0, []
        for slide in chunk.slide_ids:
            try:
                bag = self.job.cohort.bag(slide)
                with self._judge_free:
                    begun = time.perf_counter()
                    tables.append(slide_rows(slide, self.score(bag)))
                    busy += time.perf_counter() - begun
            except Exception as error:
                message = str(error) if isinstance(error, DecoError) else f"{type(error).__name__}: {error}"
                raise StageError(
                    f"scoring slide {slide} with the judge {self.job.judge.name} failed: {message}"
                ) from error
        write_atomically(self.job.part(chunk), packed(join_rows(tables)))
        return Timing(len(chunk.slide_ids), started, time.time(), busy)

    def _count_attempt(self, chunk: Chunk) -> None:
        path = self.job.attempts(chunk)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(b".")
        if path.stat().st_size > ATTEMPTS:
            raise StageError(
                f"the process scoring slides {chunk.slide_ids[0]} to {chunk.slide_ids[-1]} died {ATTEMPTS} times; "
                "most likely it ran out of memory: lower counterfactual.memory_cap_mb or resources.scorers"
            )


def packed(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def finished_part(job: ScoringJob, chunk: Chunk) -> pa.Table | None:
    """The rows of a chunk that was scored before, or none; a part of other slides (an older plan) counts as none."""
    try:
        table = pq.read_table(job.part(chunk), schema=TABLE)
    except (OSError, pa.ArrowException):
        return None
    return table if set(table["slide_id"].to_pylist()) == set(chunk.slide_ids) else None
