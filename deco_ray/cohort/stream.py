"""Bags streamed by Ray Data over a manifest of slides: one read per row group, results in the manifest's order.

The manifest (a few bytes a slide) is what gets ordered, repeated or shuffled; the features behind it are
read where they are used and never shuffled themselves.
"""

from __future__ import annotations

import collections
import itertools
import logging
import pickle
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import ray
import ray.data
import torch
from ray.experimental import internal_kv

from deco_ray.cluster import start_ray
from deco_ray.cohort.packing import Arrays, pack, unpack
from deco_ray.cohort.store import Bag, Cohort
from deco_ray.errors import CohortError, StageError, portable
from deco_ray.progress import bar

BLOCK_BYTES = 64 * 2**20  # of features behind one task: a few large slides, or many small ones
ERROR = "the block's error"  # the one column of what a failed task returns
NUMBER = "the block's number"
STOPPED = "stopped"  # the mark of a caller that wants no more, and what the tasks after it return
ATTEMPTS = 4  # a lost process or node costs one
WINDOW = 1024  # blocks in one execution: after an error each of those left still costs Ray Data 10 ms
LEAST_BLOCKS = 8  # so that a small cohort still keeps a few workers busy


def map_bags(
    cohort: Cohort,
    slide_ids: Sequence[str],
    function: Callable[[Bag], Arrays],
    *,
    num_cpus: float = 1.0,
    concurrency: int | None = None,
    verify: bool = False,
    label: str = "",
) -> Generator[tuple[str, Arrays], None, None]:
    """`function` of every bag, computed in Ray Data tasks beside the read; yields in the order of `slide_ids`.

    An error in the function or the read is raised here as it was there, naming the slide; none is tried again,
    because the same bag would fail the same way. Who may stop early closes it (contextlib.closing): left to the
    garbage collector, which runs in any thread, it could be ended by the very thread of Ray Data that it waits for.
    """
    shared = ray_put((cohort, function))

    def work(batch: pa.Table) -> pa.Table:
        try:
            opened, apply = ray.get(shared)
        except ray.exceptions.RaySystemError as unloadable:
            cause = str(unloadable).splitlines()[0]
            raise StageError(f"the function for the bags cannot be loaded in a worker ({cause})") from unloadable
        results, error = [], b""
        for slide in batch["slide_id"].to_pylist():
            try:
                results.append(apply(opened.bag(slide, verify=verify)))
            except Exception as raised:
                error = portable(raised, slide)
                break
        return pack(batch["slide_id"].to_pylist()[: len(results)], results, error)

    manifest = (pa.table({"slide_id": block}) for block in blocks(cohort, slide_ids))
    with bar(len(slide_ids), label, "slide") as shown:
        for table in run_blocks(manifest, work, num_cpus=num_cpus, concurrency=concurrency):
            for slide, arrays, error in unpack(table):
                if error:
                    raise pickle.loads(error)
                yield slide, arrays
                shown.update()


def stream_bags(
    cohort: Cohort, slide_ids: Sequence[str], *, prefetch: int = 2, num_cpus: float = 0.0, verify: bool = False
) -> Iterator[Bag]:
    """Bags in the order of `slide_ids` (repeats allowed), read ahead by Ray Data while the caller works.

    `prefetch` blocks of about 64 MB are under way at a time. Reading asks for no CPU by default: inside a training
    run every CPU may be taken already.
    """
    label_of = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
    read = map_bags(cohort, slide_ids, _arrays, num_cpus=num_cpus, concurrency=prefetch, verify=verify)
    for slide, arrays in read:
        yield Bag(slide, torch.from_numpy(arrays["features"]), arrays.get("coords"), int(label_of[slide]))


def _arrays(bag: Bag) -> Arrays:
    return {"features": bag.features.numpy()} | ({} if bag.coords is None else {"coords": bag.coords})


def run_blocks(
    tables: Iterable[pa.Table],
    work: Callable[[pa.Table], pa.Table],
    *,
    num_cpus: float = 1.0,
    concurrency: int | None = None,
) -> Iterator[pa.Table]:
    """`work` of every table as one Ray Data task each; results in order.

    A table has a column slide_id, so that a task which keeps killing its process can be told by its slides. With a
    `concurrency` the tasks run only so far ahead of the caller; without it results should be small. A caller that
    stops early waits for the tasks under way.
    """
    left = iter(tables)
    while window := list(itertools.islice(left, WINDOW)):
        yield from _run_window(window, work, num_cpus, concurrency)


def _run_window(
    tables: list[pa.Table], work: Callable[[pa.Table], pa.Table], num_cpus: float, concurrency: int | None
) -> Iterator[pa.Table]:
    given = [table.append_column(NUMBER, pa.array([number] * len(table))) for number, table in enumerate(tables)]
    _start_ray()
    run = f"deco_ray/{uuid.uuid4().hex}/"
    # from_arrow would look at its tables in a task that asks for a CPU, and wait for ever where all are taken
    manifest = ray.data.from_blocks(given)
    manifest.context.execution_options.preserve_order = True
    manifest.context.enable_progress_bars = False  # ours counts slides
    # the budgets that hold tasks back begin at nothing and are asked for once a second: until then one task runs
    # at a time, however many CPUs are free. Small results need no holding back.
    manifest.context.op_resource_reservation_enabled = concurrency is not None
    # tasks without a CPU request would otherwise all start at once
    size = concurrency if concurrency is not None else (None if num_cpus else 2)

    def guarded(batch: pa.Table) -> pa.Table:
        try:
            if internal_kv._internal_kv_exists(f"{run}{STOPPED}"):
                return pa.table({STOPPED: [True]})
            count_attempt(f"{run}{batch[NUMBER][0].as_py()}", batch["slide_id"].to_pylist())
            return work(batch.drop_columns([NUMBER]))
        except Exception as error:  # Ray Data would try a failed task again without end
            return pa.table({ERROR: [portable(error)]})

    results = manifest.map_batches(
        guarded,
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=num_cpus,
        compute=None if size is None else ray.data.TaskPoolStrategy(size=min(size, len(given))),
    )
    done = iter(results.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=1))
    # Ray Data is asked in a thread of its own: Ctrl-C, which Python raises in the main thread, then reaches the wait
    # for the answer and not Ray Data, which would cancel its tasks
    with ThreadPoolExecutor(1, "blocks") as asking:
        try:
            while (table := asking.submit(next, done, None).result()) is not None:
                if ERROR in table.column_names:
                    raise pickle.loads(table[ERROR][0].as_py())
                yield table
        finally:
            if ray.is_initialized():  # else all of this went with it
                # what is under way ends by itself, the rest at once: Ray Data would cancel both, and Ray 2.60 aborts
                # the whole process when a task ends just as it is cancelled
                internal_kv._internal_kv_put(f"{run}{STOPPED}", "")
                asking.submit(collections.deque, done, 0).result()
                internal_kv._internal_kv_del(run, del_by_prefix=True)


def count_attempt(key: str, slide_ids: list[str]) -> None:
    """Give up what killed its process too often: Ray Data starts a task whose process died again without end."""
    attempts = int(internal_kv._internal_kv_get(key) or 0) + 1
    if attempts > ATTEMPTS:
        raise StageError(
            f"the process that works on slides {slide_ids[0]} to {slide_ids[-1]} died {ATTEMPTS} times: it runs out of "
            "memory, or one of their files crashes its reader; give it more memory or leave the slide out"
        )
    internal_kv._internal_kv_put(key, str(attempts))


def ray_put(value: object) -> ray.ObjectRef:
    _start_ray()
    return ray.put(value)


def _start_ray() -> None:
    start_ray(include_dashboard=False)
    # Ray Data tells of every execution; its log file keeps all of that, the console only errors
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler).__name__ == "PlainRayHandler":
            handler.setLevel(logging.ERROR)


def blocks(cohort: Cohort, slide_ids: Sequence[str], least: int = LEAST_BLOCKS) -> Iterator[list[str]]:
    """Consecutive slides in `least` groups or more of at most about BLOCK_BYTES; borders depend on the data only."""
    sizes = dict(zip(cohort.slides["slide_id"], (cohort.slides["n_patches"] * cohort.dim * 4).tolist()))
    unknown = [slide for slide in slide_ids if slide not in sizes]
    if unknown:
        raise CohortError(f"slide {unknown[0]!r} is not in cohort {cohort.name}")
    limit = min(BLOCK_BYTES, sum(sizes[slide] for slide in slide_ids) / least)
    block: list[str] = []
    total = 0
    for slide in slide_ids:
        if block and total + sizes[slide] > limit:
            yield block
            block, total = [], 0
        block.append(slide)
        total += sizes[slide]
    if block:
        yield block
