"""Features for training through Ray: in shared memory once per node for all runs, or streamed behind the plan.

Either way a run sees the same bags in the same order. A handle is made on the driver, travels with a run and
is opened where the run happens.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import torch
from ray.exceptions import OutOfMemoryError, WorkerCrashedError
from torch import Tensor

from deco_ray.cohort.store import Cohort
from deco_ray.cohort.stream import blocks, stream_bags
from deco_ray.errors import DecoError, StageError
from deco_ray.training.slides import LocalSource, Source

MEMORY_SHARE = 0.5  # of a node's object store: the rest is for results in flight
IN_FLIGHT = 4  # blocks read at a time: reading asks for no CPU, since runs may hold them all
WINDOW_BYTES = 2 * 2**30  # of features behind one Ray Data execution; its start hides behind the last one
AHEAD_BYTES = 128 * 2**20  # of bags waiting for the training


@dataclass(frozen=True)
class SharedFeatures:
    """Blocks of slides in Ray's object store, made by tasks so that a lost block is read again."""

    slides: list[list[tuple[str, int]]]  # per block: slide id and number of patches
    refs: list[Any]

    def open(self) -> Source:
        """All bags as views of shared memory; a node copies each block at most once, whoever asks."""
        bags: dict[str, Tensor] = {}
        ray.wait(self.refs, num_returns=len(self.refs))  # all of them on their way at once
        for slides, ref in zip(self.slides, self.refs):
            block = self._block(slides, ref)
            borders = np.cumsum([size for _, size in slides])[:-1]
            for (slide, _), features in zip(slides, np.split(block, borders)):
                bags[slide] = read_only(features)
        return LocalSource(bags)

    def _block(self, slides: list[tuple[str, int]], ref: Any) -> np.ndarray:
        try:
            return ray.get(ref)
        except (WorkerCrashedError, OutOfMemoryError) as error:  # Ray has tried it again before
            raise StageError(
                f"the process that reads slides {slides[0][0]} to {slides[-1][0]} died again and again: it runs out of "
                "memory, or their file crashes its reader; give it more memory or leave the slide out"
            ) from error


@dataclass(frozen=True)
class StreamedFeatures:
    """Bags read from Parquet by Ray Data, ahead of the training."""

    cohort: Cohort

    def open(self) -> Source:
        return StreamSource(self.cohort)


Handle = SharedFeatures | StreamedFeatures


def open_source(
    cohort: Cohort, slide_ids: Sequence[str], data: Literal["auto", "memory", "stream"] = "auto"
) -> tuple[Handle, str]:
    """A handle on the features of these slides, and how they will come; Ray must be initialised."""
    gigabytes = feature_bytes(cohort, slide_ids) / 2**30
    if data == "stream" or (data == "auto" and not fits(cohort, slide_ids)):
        return StreamedFeatures(cohort), f"streamed ({gigabytes:.2f} GB an epoch at most)"
    if not fits(cohort, slide_ids):
        raise DecoError(
            f"resources.data = memory, but {gigabytes:.2f} GB of features do not fit into {MEMORY_SHARE:.0%} of the "
            "object store; start Ray with a larger object store or use resources.data = stream"
        )
    return load_features(cohort, slide_ids), f"in shared memory ({gigabytes:.2f} GB)"


def fits(cohort: Cohort, slide_ids: Sequence[str]) -> bool:
    """Whether every node that runs work can hold these slides in its share of the object store."""
    stores = [
        node["Resources"].get("object_store_memory", 0.0)
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    ]
    return feature_bytes(cohort, slide_ids) <= MEMORY_SHARE * min(stores, default=0.0)


def feature_bytes(cohort: Cohort, slide_ids: Sequence[str]) -> int:
    chosen = cohort.slides["slide_id"].isin(set(slide_ids))
    return int(cohort.slides.loc[chosen, "n_patches"].sum()) * cohort.dim * 4


def load_features(cohort: Cohort, slide_ids: Sequence[str]) -> SharedFeatures:
    """Read the slides into the object store, owned by the caller."""
    sizes = dict(zip(cohort.slides["slide_id"], cohort.slides["n_patches"].astype(int)))
    shared_cohort = ray.put(cohort)
    read = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(read_block)
    refs: list[Any] = []
    slides: list[list[tuple[str, int]]] = []
    unfinished: list[Any] = []
    for block in blocks(cohort, slide_ids, least=1):  # reading is quick, starting another process is not
        if len(unfinished) == IN_FLIGHT:
            _, unfinished = ray.wait(unfinished, fetch_local=False)
        refs.append(read.remote(shared_cohort, block))
        unfinished.append(refs[-1])
        slides.append([(slide, sizes[slide]) for slide in block])
    ray.wait(refs, num_returns=len(refs), fetch_local=False)
    return SharedFeatures(slides, refs)


def read_block(cohort: Cohort, slide_ids: list[str]) -> np.ndarray:  # [sum of patches, d]
    return np.concatenate([cohort.bag(slide, verify=True).features.numpy() for slide in slide_ids])


def read_only(features: np.ndarray) -> Tensor:
    """A tensor on shared memory; nothing in training writes to a bag."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(features)


class StreamSource:
    """Bags from Ray Data in the order asked for, fetched by a thread while the training computes."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort = cohort
        typical = max(float(cohort.slides["n_patches"].mean()) * cohort.dim * 4, 1.0)
        self.ahead = int(np.clip(AHEAD_BYTES / typical, 2, 1024))  # bags
        self.verified: set[str] = set()  # slides compared with their ingest: once a run, its first epoch as a rule

    def bags(self, slide_ids: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        ready: queue.Queue[tuple[str, Any]] = queue.Queue(self.ahead)
        closed = threading.Event()

        def put(item: tuple[str, Any]) -> None:
            while not closed.is_set():
                try:
                    return ready.put(item, timeout=0.5)
                except queue.Full:
                    continue

        def fetch() -> None:
            try:
                for window in self.windows(slide_ids):
                    for bag in stream_bags(self.cohort, window, verify=not self.verified.issuperset(window)):
                        put((bag.slide_id, bag.features))
                        if closed.is_set():
                            return
                    self.verified.update(window)
                put(("", None))
            except BaseException as error:  # handed to the training, which is the one to fail
                put(("", error))

        thread = threading.Thread(target=fetch, name="bags", daemon=True)
        thread.start()
        try:
            while True:
                slide, features = ready.get()
                if features is None:
                    return
                if isinstance(features, BaseException):
                    raise features
                yield slide, features
        finally:
            closed.set()
            thread.join()

    def windows(self, slide_ids: Iterable[str]) -> Iterator[list[str]]:
        """Consecutive slides, so many that starting Ray Data for them is worth it."""
        sizes = dict(zip(self.cohort.slides["slide_id"], self.cohort.slides["n_patches"] * self.cohort.dim * 4))
        window: list[str] = []
        total = 0
        for slide in slide_ids:
            window.append(slide)
            total += int(sizes[slide])
            if total >= WINDOW_BYTES:
                yield window
                window, total = [], 0
        if window:
            yield window
