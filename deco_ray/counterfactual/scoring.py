"""Scoring on Ray: one judge per actor, slides largest first, finished chunks on disk.

Scorers hold no state but the judge and write each chunk under its own name, so a killed actor or node loses
no slide and doubles none: Ray starts the actor again, repeats the chunk, and the same file appears. The table
is put together in the cohort's order and does not depend on how many scorers there were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
import torch
from ray.exceptions import RayTaskError

from deco_ray.artefacts import ArtefactStore, digest
from deco_ray.cohort.splits import Split
from deco_ray.cohort.store import Cohort
from deco_ray.config import CounterfactualSection
from deco_ray.counterfactual.slide_scorer import (
    Chunk,
    ScoringJob,
    SlideScorer,
    Timing,
    finished_part,
    plan_chunks,
)
from deco_ray.counterfactual.table import contribution_inputs, join_rows, write_table
from deco_ray.errors import DecoError, StageError
from deco_ray.progress import bar

__all__ = ["contribution_inputs", "ensure_contributions", "score_slides"]

KIND = "contributions"
AT_ONCE = 2  # chunks in one scorer: one with the judge, one reading ahead
Report = Callable[[dict[str, Any]], Any]


def ensure_contributions(
    cohort: Cohort,
    split: Split,
    anchors: str | Path,
    judge: str | Path,
    section: CounterfactualSection,
    store: ArtefactStore,
    *,
    scorers: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    threads: int = 1,
    report: Report | None = None,
) -> tuple[str, Path]:
    """Digest and folder of the contribution table of the split's training slides; scored only if not there yet.

    `anchors` and `judge` are artefact folders, named by their digests. With no scorers the work is done in
    this process; otherwise each is an actor with so many CPUs and (a share of) GPUs.
    """
    anchors, judge = Path(anchors), Path(judge)
    inputs = contribution_inputs(anchors.name, judge.name, section)
    key = digest(inputs)
    if store.exists(KIND, key):
        return key, store.path(KIND, key)
    labels = dict(zip(cohort.slides["slide_id"], cohort.slides["label"].astype(int)))
    slides = [slide for slide in split.ids("train") if labels[slide] != cohort.meta.normal_class]
    job = ScoringJob(
        cohort.uri,
        cohort.checksum,
        anchors.absolute(),
        judge.absolute(),
        section,
        tuple(split.train_counts(cohort)),
        store.work(KIND, key).absolute(),
        threads,
        gpus > 0 and torch.cuda.is_available() if scorers == 0 else gpus > 0,
    )
    with store.unless_made(KIND, key):
        table = score_slides(job, slides, scorers=scorers, cpus=cpus, gpus=gpus, report=report)
        with store.writing(KIND, key, inputs, slides=len(slides), rows=len(table)) as folder:
            write_table(table, folder)
    return key, store.path(KIND, key)


def score_slides(
    job: ScoringJob,
    slide_ids: Sequence[str],
    *,
    scorers: int = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    report: Report | None = None,
    timings: list[tuple[int, Timing]] | None = None,
) -> pa.Table:
    """The contribution table of these slides, in this order; goes on where an interrupted scoring stopped.

    `timings` collects (scorer, timing) of each chunk scored now.
    """
    chunks = plan_chunks(job.cohort, slide_ids)
    missing = [chunk for chunk in chunks if finished_part(job, chunk) is None]
    for chunk in missing:  # deaths count within one run of the stage
        job.attempts(chunk).unlink(missing_ok=True)
    done = len(slide_ids) - sum(len(chunk.slide_ids) for chunk in missing)
    results = _in_this_process(job, missing) if scorers == 0 else _on_actors(job, missing, scorers, cpus, gpus)
    with bar(len(slide_ids), "" if report else "score slides", "slide", initial=done) as shown:
        for scorer, timing in results:
            done += timing.slides
            shown.update(timing.slides)
            if timings is not None:
                timings.append((scorer, timing))
            if report is not None:
                report({"slides_scored": done, "slides": len(slide_ids)})
    return _in_order(job, chunks, slide_ids)


def _in_order(job: ScoringJob, chunks: Sequence[Chunk], slide_ids: Sequence[str]) -> pa.Table:
    tables = [finished_part(job, chunk) for chunk in chunks]
    lost = [chunk.number for chunk, table in zip(chunks, tables) if table is None]
    if lost:
        raise StageError(f"chunks {lost} disappeared from {job.work} while scoring; run the same command again")
    table = join_rows(table for table in tables if table is not None)
    rank = {slide: position for position, slide in enumerate(slide_ids)}
    position = pa.array([rank[slide] for slide in table["slide_id"].to_pylist()], pa.int64())
    order = pc.sort_indices(
        pa.table({"position": position, "anchor": table["anchor"]}),
        sort_keys=[("position", "ascending"), ("anchor", "ascending")],
    )
    return table.take(order)


def _in_this_process(job: ScoringJob, chunks: Sequence[Chunk]) -> Iterator[tuple[int, Timing]]:
    scorer = SlideScorer(job)
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for timing in pool.map(scorer.score_chunk, chunks):
            yield 0, timing
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _on_actors(
    job: ScoringJob, chunks: Sequence[Chunk], scorers: int, cpus: float, gpus: float
) -> Iterator[tuple[int, Timing]]:
    if not chunks:
        return
    # unlimited restarts are for deaths of processes and nodes; an exception is never repeated
    remote = ray.remote(SlideScorer).options(
        num_cpus=cpus, num_gpus=gpus, max_restarts=-1, max_task_retries=-1, max_concurrency=AT_ONCE
    )
    actors: list[Any] = [remote.remote(job) for _ in range(min(scorers, len(chunks)))]
    waiting = iter(chunks)
    running: dict[ray.ObjectRef, int] = {}

    def start(scorer: int) -> None:
        chunk = next(waiting, None)
        if chunk is not None:
            running[actors[scorer].score_chunk.remote(chunk)] = scorer

    try:
        for _ in range(AT_ONCE):
            for scorer in range(len(actors)):
                start(scorer)
        while running:
            finished, _ = ray.wait(list(running), num_returns=1)
            scorer = running.pop(finished[0])
            timing = ray.get(finished[0])
            start(scorer)
            yield scorer, timing
    except RayTaskError as error:
        if isinstance(error.cause, DecoError | OSError):  # the caller explains a full disk
            raise error.cause from None
        raise
    finally:
        for actor in actors:
            ray.kill(actor)
