"""Shared features that are watched: how often they were opened, and what happens at which bag."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ray import cloudpickle
from torch import Tensor

from deco_ray.training.shared import SharedFeatures
from deco_ray.training.slides import Source

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not find the tests' folder


@dataclass
class WatchedFeatures:
    """A handle that leaves a note in `notes` at every opening and calls `watch` before every bag, counting them."""

    features: SharedFeatures
    notes: Path
    watch: Callable[[int], None]

    def open(self) -> Source:
        self.notes.mkdir(exist_ok=True)
        (self.notes / f"{time.time_ns()}-{os.getpid()}").touch()
        return WatchedSource(self.features.open(), self.watch)

    def openings(self) -> int:
        return len(list(self.notes.iterdir()))


@dataclass
class WatchedSource:
    inner: Source
    watch: Callable[[int], None]

    def bags(self, slide_ids: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for count, bag in enumerate(self.inner.bags(slide_ids)):
            self.watch(count)
            yield bag
