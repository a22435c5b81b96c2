"""The slides of a run: who is trained and validated on, DeCo's view of each, and where features come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from deco_ray.cohort.splits import Split, frequency_groups
from deco_ray.cohort.store import Cohort


@dataclass(frozen=True)
class RunSlides:
    """Everything a run knows about its slides except their features."""

    train: list[str]
    val: list[str]
    test: list[str]
    labels: Mapping[str, int]
    classes: int
    assignments: Mapping[str, np.ndarray] = field(default_factory=dict)  # DeCo: anchor of each patch, [N]
    ratios: Mapping[str, np.ndarray] = field(default_factory=dict)  # DeCo: masking ratio of each anchor, [K]

    @property
    def train_counts(self) -> list[int]:
        return np.bincount([self.labels[slide] for slide in self.train], minlength=self.classes).tolist()

    @property
    def groups(self) -> dict[str, list[int]]:
        return frequency_groups(self.train_counts)


def run_slides(
    cohort: Cohort,
    split: Split,
    assignments: Mapping[str, np.ndarray] | None = None,
    ratios: Mapping[str, np.ndarray] | None = None,
) -> RunSlides:
    labels = {str(slide): int(label) for slide, label in zip(cohort.slides["slide_id"], cohort.slides["label"])}
    return RunSlides(
        split.ids("train"),
        split.ids("val"),
        split.ids("test"),
        labels,
        len(cohort.classes),
        assignments or {},
        ratios or {},
    )


class Source(Protocol):
    def bags(self, slide_ids: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(slide id, unit features float32 [N, d]) in the order asked for; repeats allowed, closable early."""
        ...


@dataclass(frozen=True)
class LocalSource:
    """Features held in this process, for small cohorts and tests."""

    features: Mapping[str, Tensor]

    @classmethod
    def read(cls, cohort: Cohort, slide_ids: Iterable[str]) -> LocalSource:
        return cls({slide: cohort.bag(slide).features for slide in slide_ids})

    def bags(self, slide_ids: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for slide in slide_ids:
            yield slide, self.features[slide]
