"""Bags streamed by Ray Data over a manifest of slides: one read per row group, results in the manifest's order.

The manifest (a few bytes a slide) is what gets ordered, repeated or shuffled; the features behind it are
read where they are used and never shuffled themselves.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from deco_ray.cohort.store import Bag, Cohort
from deco_ray.progress import bar

Arrays = dict[str, np.ndarray]
BLOCK_BYTES = 64 * 2**20  # of features behind one task: a few large slides, or many small ones


def map_bags(
    cohort: Cohort,
    slide_ids: Sequence[str],
    function: Callable[[Bag], Arrays],
    *,
    num_cpus: float = 1.0,
    label: str = "",
) -> Iterator[tuple[str, Arrays]]:
    """`function` of every bag, computed in Ray Data tasks beside the read; yields in the order of `slide_ids`."""
    shared = ray.put((cohort, function))

    def work(batch: pa.Table) -> pa.Table:
        opened, apply = ray.get(shared)
        rows = [pack(apply(opened.bag(slide))) for slide in batch["slide_id"].to_pylist()]
        return pa.table({"slide_id": batch["slide_id"], "arrays": pa.array(rows, pa.large_binary())})

    with bar(len(slide_ids), label, "slide") as shown:
        for block in _run(cohort, slide_ids, work, num_cpus):
            for slide, packed in zip(block["slide_id"].to_pylist(), block["arrays"]):
                yield slide, unpack(packed.as_buffer())
                shown.update()


def stream_bags(cohort: Cohort, slide_ids: Sequence[str], *, num_cpus: float = 0.0) -> Iterator[Bag]:
    """Bags in the order of `slide_ids` (repeats allowed), read ahead by Ray Data while the caller works.

    Reading asks for no CPU by default: inside a training run every CPU may be taken already.
    """
    rows = cohort.slides.set_index("slide_id")["label"]
    for slide, arrays in map_bags(cohort, slide_ids, _features, num_cpus=num_cpus, label=""):
        coords = arrays.get("coords")
        yield Bag(slide, torch.from_numpy(arrays["features"]), coords, int(rows[slide]))


def _features(bag: Bag) -> Arrays:
    arrays: Arrays = {"features": bag.features.numpy()}
    if bag.coords is not None:
        arrays["coords"] = bag.coords
    return arrays


def _run(
    cohort: Cohort, slide_ids: Sequence[str], work: Callable[[pa.Table], pa.Table], num_cpus: float
) -> Iterator[pa.Table]:
    if not len(slide_ids):
        return
    manifest = ray.data.from_arrow([pa.table({"slide_id": list(block)}) for block in blocks(cohort, slide_ids)])
    manifest.context.execution_options.preserve_order = True
    manifest.context.enable_progress_bars = False
    results = manifest.map_batches(work, batch_format="pyarrow", batch_size=None, num_cpus=num_cpus)
    yield from results.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=2)


def blocks(cohort: Cohort, slide_ids: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive slides grouped to about BLOCK_BYTES of features; borders depend on the data only."""
    sizes = dict(zip(cohort.slides["slide_id"], cohort.slides["n_patches"] * cohort.dim * 4))
    block: list[str] = []
    total = 0
    for slide in slide_ids:
        if block and total + sizes[slide] > BLOCK_BYTES:
            yield block
            block, total = [], 0
        block.append(slide)
        total += int(sizes[slide])
    if block:
        yield block


def pack(arrays: Arrays) -> bytes:
    """Arrays as bytes; our own tasks write and read them, never files of users."""
    return pickle.dumps({name: np.ascontiguousarray(array) for name, array in arrays.items()}, protocol=5)


def unpack(buffer: Any) -> Arrays:
    return pickle.loads(buffer)
