"""What the data support: changes per class, comparisons between methods, and a verdict in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deco_ray.results.bootstrap import (
    LEVEL,
    RESAMPLES,
    Groups,
    Predictions,
    paired_bootstrap,
    paired_randomisation,
    scores,
)
from deco_ray.results.canvas import metric_name
from deco_ray.results.tables import Column, Table

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class ClassChange:
    """F1 of one class from judge to final, in fractions, with its interval over test slides."""

    label: int
    name: str
    before: float
    after: float
    low: float
    high: float

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def lost(self) -> bool:
        """The class loses more than its interval: even the interval's upper end is below zero."""
        return self.high < 0


@dataclass(frozen=True)
class Comparison:
    """The reference method against another on one metric; differences are reference minus other, in fractions."""

    metric: str
    reference: str
    other: str
    difference: float
    low: float
    high: float
    p: float
    p_holm: float
    won: int  # seeds in which the reference scores higher
    tied: int
    lost: int
    slides: int


def confusion_matrices(predictions: Predictions) -> np.ndarray:
    """Counts [seeds, true, predicted]."""
    side = predictions.classes
    flat = predictions.labels * side + predictions.predicted  # [seeds, n]
    return np.stack([np.bincount(row, minlength=side * side).reshape(side, side) for row in flat])


def class_changes(
    judge: Predictions,
    final: Predictions,
    class_names: Sequence[str],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> list[ClassChange]:
    """The change of F1 (mean over seeds) from judge to final of every class with test slides."""
    differences = paired_bootstrap(judge, final, {}, resamples=resamples, seed=seed, level=level)
    before, after = (scores(confusion_matrices(stage), {}) for stage in (judge, final))
    changes = []
    for label, name in enumerate(class_names):
        key = f"f1_{label}"
        if key not in differences:
            continue  # no test slides of this class
        found = differences[key]
        changes.append(
            ClassChange(label, str(name), float(before[key].mean()), float(after[key].mean()), found.low, found.high)
        )
    return changes


def class_warnings(changes: Sequence[ClassChange], test_counts: Sequence[int]) -> list[str]:
    """One line for every class that loses more than its interval; test slides per class index."""
    return [
        f"class {change.name!r} loses: F1 {100 * change.before:.1f} → {100 * change.after:.1f} from judge to final "
        f"({_points(change.change)} points, 95 % interval {_points(change.low)} to {_points(change.high)} "
        f"over test slides, {test_counts[change.label]} of this class)"
        for change in changes
        if change.lost
    ]


def class_change_table(
    changes: Sequence[ClassChange], train_counts: Sequence[int], test_counts: Sequence[int]
) -> Table:
    columns = (
        Column("Class"),
        Column("Train", digits=0),
        Column("Test", digits=0),
        Column("Judge F1 (%)", digits=1),
        Column("Final F1 (%)", digits=1),
        Column("Change", digits=1),
        Column("95 % low", digits=1),
        Column("95 % high", digits=1),
        Column("Reading"),
    )
    rows = [
        [
            change.name,
            int(train_counts[change.label]),
            int(test_counts[change.label]),
            *(100 * value for value in (change.before, change.after, change.change, change.low, change.high)),
            "loses" if change.lost else "gains" if change.low > 0 else "undecided",
        ]
        for change in changes
    ]
    note = "Train, Test: slides. Change in percentage points, mean over seeds; interval: bootstrap over test slides."
    return Table(columns, rows, "Per-class F1 from judge to final", note)


def seeds_won(reference: Mapping[int, float], other: Mapping[int, float]) -> tuple[int, int, int]:
    """(won, tied, lost) over the seeds both methods have."""
    pairs = [(reference[seed], other[seed]) for seed in reference if seed in other]
    won = sum(a > b for a, b in pairs)
    lost = sum(a < b for a, b in pairs)
    return won, len(pairs) - won - lost, lost


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the given order."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]))
    return adjusted.tolist()


def compare_methods(
    methods: Mapping[str, Predictions],
    reference: str,
    groups: Groups,
    *,
    metrics: Sequence[str] = ("macro_f1", "tail_f1"),
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Comparison]:
    """The reference against every other method on each metric; p-values Holm-corrected within a metric.

    Metrics that count predictions only: acc, macro_f1, <group>_f1, f1_<class>. Those of empty groups are left out.
    Methods with another number of seeds are compared over the seeds they share.
    """
    main = methods[reference]
    found: dict[str, list[Comparison]] = {metric: [] for metric in metrics}
    for name, predictions in methods.items():
        if name == reference:
            continue
        first, second = shared_seeds(predictions, main)
        differences = paired_bootstrap(first, second, groups, resamples=resamples, seed=seed)
        p_values = paired_randomisation(first, second, groups, resamples=resamples, seed=seed)
        theirs, ours = scores(confusion_matrices(first), groups), scores(confusion_matrices(second), groups)
        for metric in metrics:
            if metric not in differences:
                continue
            gap = differences[metric]
            count = seeds_won(dict(zip(second.seeds, ours[metric])), dict(zip(first.seeds, theirs[metric])))
            found[metric].append(
                Comparison(
                    metric,
                    reference,
                    name,
                    gap.estimate,
                    gap.low,
                    gap.high,
                    p_values[metric],
                    1.0,
                    *count,
                    len(main.labels),
                )
            )
    return [
        Comparison(**{**vars(entry), "p_holm": corrected})
        for entries in found.values()
        for entry, corrected in zip(entries, holm([entry.p for entry in entries]))
    ]


def shared_seeds(first: Predictions, second: Predictions) -> tuple[Predictions, Predictions]:
    """Both restricted to the seeds they share, in one order; all of their runs when they share none."""
    common = [seed for seed in first.seeds if seed in second.seeds]
    if not common:
        return first, second

    def keep(predictions: Predictions) -> Predictions:
        rows = [predictions.seeds.index(seed) for seed in common]
        return Predictions(
            predictions.slide_ids, predictions.labels, predictions.predicted[rows], tuple(common), predictions.classes
        )

    return keep(first), keep(second)


def comparison_statistics_table(comparisons: Sequence[Comparison], names: Mapping[str, str] | None = None) -> Table:
    columns = (
        Column("Metric"),
        Column("Against"),
        Column("Difference", digits=2),
        Column("95 % low", digits=2),
        Column("95 % high", digits=2),
        Column("p", digits=4),
        Column("p (Holm)", digits=4),
        Column("Seeds won"),
        Column("Reading"),
    )
    rows = [
        [
            metric_name(entry.metric),
            (names or {}).get(entry.other, entry.other),
            100 * entry.difference,
            100 * entry.low,
            100 * entry.high,
            entry.p,
            entry.p_holm,
            f"{entry.won} of {entry.won + entry.tied + entry.lost}",
            _reading(entry),
        ]
        for entry in comparisons
    ]
    reference = comparisons[0].reference if comparisons else "reference"
    note = (
        "Differences in percentage points. Interval: paired bootstrap over test slides; p: paired randomisation of "
        "slides, Holm-corrected within a metric. Both hold the trained models fixed."
    )
    return Table(columns, rows, f"{(names or {}).get(reference, reference)} against the others", note)


def _reading(entry: Comparison) -> str:
    if entry.p_holm >= SIGNIFICANT:
        return "undecided"
    return "better" if entry.difference > 0 else "worse"


def verdict(comparisons: Sequence[Comparison], metric: str = "macro_f1", names: Mapping[str, str] | None = None) -> str:
    """One sentence or two that say what the comparisons support, and what they do not."""
    entries = [entry for entry in comparisons if entry.metric == metric]
    if not entries:
        return f"Nothing to compare on {metric_name(metric)}."
    show = dict(names or {})
    reference = show.get(entries[0].reference, entries[0].reference)
    parts = []
    for reading, words in (
        ("better", "is better than"),
        ("worse", "is worse than"),
        ("undecided", "cannot be told apart from"),
    ):
        chosen = [entry for entry in entries if _reading(entry) == reading]
        if chosen:
            listed = ", ".join(
                f"{show.get(entry.other, entry.other)} ({_points(entry.difference)} points, "
                f"{_points(entry.low)} to {_points(entry.high)})"
                for entry in chosen
            )
            parts.append(f"{words} {listed}")
    seeds = entries[0].won + entries[0].tied + entries[0].lost
    plural = "s" if seeds != 1 else ""
    return (
        f"On {metric_name(metric)}, over {entries[0].slides} test slides and {seeds} seed{plural}, {reference} "
        + "; ".join(parts)
        + f". Level: Holm-corrected p < {SIGNIFICANT}; intervals are 95 % over test slides."
    )


def _points(fraction: float) -> str:
    value = round(100 * fraction, 1) + 0.0  # no "-0.0"
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{abs(value):.1f}"
