"""Which slides an epoch visits, how often and in what order; all of it known before the epoch starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deco_ray.keys import Part, generator


@dataclass(frozen=True)
class PlannedVisit:
    """One training step: a slide, how often the epoch saw it before, and the partner slide of methods that need one."""

    slide_id: str
    repeat: int
    partner: str | None = None


def oversampling_counts(train_counts: Sequence[int], alpha: float = 0.8, cap: int = 8) -> list[int]:
    """Visits a_c per epoch of a slide of each class: clip(round((n_max / n_c)^α), 1, cap) (Eq. 12)."""
    counts = np.asarray(train_counts, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(
            counts > 0, counts.max(initial=0) / counts, np.inf
        )  # a class without slides is as rare as can be
    visits = np.floor(np.minimum(ratio**alpha, cap) + 0.5)
    return [int(count) for count in np.clip(visits, 1, cap)]


def epoch_visits(
    slide_ids: Sequence[str],
    labels: Mapping[str, int],
    *,
    key: Sequence[Part],
    repeats: Sequence[int] | None = None,
    resampling: str = "none",
    partners: bool = False,
) -> list[PlannedVisit]:
    """The visits of one epoch in order; `key` is (seed, stage, epoch), `repeats` the visits of a slide per class.

    With resampling the epoch draws as many slides as there are, with replacement: classes equally likely
    (balanced) or in proportion to the square root of their size (sqrt).
    """
    classes = np.array([labels[slide] for slide in slide_ids])
    rng = generator(*key, "order")
    if resampling == "none":
        times = np.ones(len(slide_ids), int) if repeats is None else np.asarray(repeats)[classes]
        order = rng.permutation(np.repeat(np.arange(len(slide_ids)), times))
    else:
        order = rng.choice(len(slide_ids), len(slide_ids), p=slide_weights(classes, resampling))
    seconds: list[str | None] = [None] * len(order)
    if partners:
        drawn = generator(*key, "partner").choice(len(slide_ids), len(order), p=slide_weights(classes, "balanced"))
        seconds = [slide_ids[index] for index in drawn]
    seen: Counter[int] = Counter()
    visits = []
    for index, partner in zip(order.tolist(), seconds):
        visits.append(PlannedVisit(slide_ids[index], seen[index], partner))
        seen[index] += 1
    return visits


def slide_weights(classes: np.ndarray, resampling: str) -> np.ndarray:
    """Probability of each slide when a class of n slides is drawn in proportion to 1 (balanced) or √n (sqrt)."""
    counts = np.bincount(classes)[classes].astype(np.float64)
    weights = 1.0 / counts if resampling == "balanced" else 1.0 / np.sqrt(counts)
    return weights / weights.sum()
