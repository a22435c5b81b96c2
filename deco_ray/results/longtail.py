"""The nested dual long tail (supplement, "Nested Dual Long-Tail Statistics"): how few anchors carry a group's evidence.

For each frequency group of classes: the ranked mean contributions of its anchors, and how concentrated their
positive part is (Lorenz curve, Gini coefficient, share and patch coverage of the top tenth).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from deco_ray.results.canvas import FAINT, GROUP_COLOURS, PAGE, colour, new_figure, styled
from deco_ray.results.tables import Column, Estimate, Table, estimate

LINE_STYLES = {"head": "-", "medium": "--", "tail": "-."}


@dataclass(frozen=True)
class GroupConcentration:
    """One frequency group; anchors in order of decreasing mean contribution. None where nothing is positive."""

    group: str
    classes: tuple[int, ...]
    slides: int  # lesion slides of the group with at least one valid contribution
    anchors: tuple[int, ...]  # valid anchors, ranked
    contribution: tuple[float, ...]  # their signed means over slides
    lorenz: tuple[float, ...]  # cumulative share of the clipped contributions, ascending, n + 1 values from 0 to 1
    gini: float | None
    top: int  # anchors in the top tenth
    top_share: float | None
    patch_coverage: float | None


@dataclass(frozen=True)
class LongTail:
    groups: tuple[GroupConcentration, ...]  # head, medium, tail; groups without lesion slides have no anchors

    def as_dict(self) -> dict[str, Any]:
        return {entry.group: asdict(entry) for entry in self.groups}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, allow_nan=False)


def nested_long_tail(contributions: pa.Table | pd.DataFrame, groups: Mapping[str, Sequence[int]]) -> LongTail:
    """The statistics of every group from a contributions table (one row per slide and non-empty anchor)."""
    frame = contributions.to_pandas() if isinstance(contributions, pa.Table) else contributions
    frame = frame[np.isfinite(frame["effect_label"].to_numpy(float))]  # absent or invalid: not in the denominator
    return LongTail(tuple(_group(name, tuple(map(int, classes)), frame) for name, classes in groups.items()))


def _group(name: str, classes: tuple[int, ...], frame: pd.DataFrame) -> GroupConcentration:
    rows = frame[frame["label"].isin(classes)]
    anchor = rows["anchor"].to_numpy(np.int64)
    if not len(anchor):
        return GroupConcentration(name, classes, 0, (), (), (), None, 0, None, None)
    valid, index, present = np.unique(anchor, return_inverse=True, return_counts=True)
    # every row is one slide, so slides weigh the same within an anchor
    mean = np.bincount(index, rows["effect_label"].to_numpy(float)) / present
    patches = np.bincount(index, rows["n_patches"].to_numpy(float))
    order = np.lexsort((valid, -mean))  # ties: the lower anchor first
    mean, patches, valid = mean[order], patches[order], valid[order]
    top = top_tenth(len(mean))
    clipped = np.maximum(mean, 0.0)
    total = float(clipped.sum())
    return GroupConcentration(
        group=name,
        classes=classes,
        slides=int(rows["slide_id"].nunique()),
        anchors=tuple(valid.tolist()),
        contribution=tuple(mean.tolist()),
        lorenz=tuple(lorenz_curve(clipped).tolist()),
        gini=gini(clipped),
        top=top,
        top_share=float(clipped[:top].sum()) / total if total > 0 else None,
        patch_coverage=float(patches[:top].sum() / patches.sum()),
    )


def top_tenth(n: int) -> int:
    """max(1, round(0.1 n)), halves up, in whole numbers so that 0.1 n has no rounding error of its own."""
    return max(1, (n + 5) // 10)


def gini(values: np.ndarray) -> float | None:
    """Gini coefficient of a non-negative vector; none when it sums to zero."""
    ascending = np.sort(np.asarray(values, dtype=float))
    n, total = len(ascending), float(ascending.sum())
    if n == 0 or total <= 0:
        return None
    return float(2 * (np.arange(1, n + 1) * ascending).sum() / (n * total) - (n + 1) / n)


def lorenz_curve(values: np.ndarray) -> np.ndarray:
    """Cumulative shares of the ascending vector, from 0 to 1; empty when it sums to zero."""
    running = np.concatenate([[0.0], np.cumsum(np.sort(np.asarray(values, dtype=float)))])
    return running / running[-1] if running[-1] > 0 else np.empty(0)


def longtail_table(analyses: Sequence[LongTail]) -> Table:
    """One row per group, mean ± std over the given analyses (one per seed)."""
    columns = (
        Column("Group"),
        Column("Lesion slides", digits=0),
        Column("Valid anchors", digits=1),
        Column("Gini", digits=3),
        Column("Top-10 % share (%)", digits=1),
        Column("Patch coverage (%)", digits=1),
    )
    rows: list[list[Any]] = []
    for position, first in enumerate(analyses[0].groups):
        entries = [analysis.groups[position] for analysis in analyses]
        rows.append(
            [
                first.group.capitalize(),
                first.slides,
                estimate([float(len(entry.anchors)) for entry in entries]),
                _over([entry.gini for entry in entries]),
                _over([entry.top_share for entry in entries], 100),
                _over([entry.patch_coverage for entry in entries], 100),
            ]
        )
    note = "Top 10 %: the anchors with the largest mean contribution. A dash: no positive contribution in the group."
    return Table(columns, rows, "Concentration of discriminative evidence", note)


def _over(values: Sequence[float | None], scale: float = 1.0) -> Estimate | None:
    known = [value * scale for value in values if value is not None]
    return estimate(known) if known else None


@styled
def longtail_figure(analyses: Sequence[LongTail]) -> Figure:
    """Figure 5: (a) ranked mean contributions, (b) Lorenz curves with Gini coefficients; more seeds faintly."""
    figure, (ranked, lorenz) = new_figure(PAGE, 2.6, 1, 2)
    ranked.axhline(0, color=FAINT, linewidth=0.7)
    lorenz.plot([0, 100], [0, 100], color=FAINT, linewidth=0.8, linestyle=":", label="Equal shares")
    for position, first in enumerate(analyses[0].groups):
        ink, line = GROUP_COLOURS.get(first.group, colour(position)), LINE_STYLES.get(first.group, "-")
        ginis = _over([analysis.groups[position].gini for analysis in analyses])
        for number, analysis in enumerate(analyses):
            entry = analysis.groups[position]
            look: dict[str, Any] = {"color": ink, "linestyle": line, "alpha": 1.0 if number == 0 else 0.3}
            look["linewidth"] = 1.5 if number == 0 else 0.8
            name = first.group.capitalize() if number == 0 else None
            if entry.anchors:
                ranked.plot(range(1, len(entry.anchors) + 1), entry.contribution, label=name, **look)
            if entry.lorenz:
                shown = f"{name} (Gini {ginis.text(2)})" if name and ginis else None
                lorenz.plot(np.linspace(0, 100, len(entry.lorenz)), np.multiply(entry.lorenz, 100), label=shown, **look)
    ranked.set(xlabel="Anchor rank", ylabel="Mean debiased contribution", title="(a) Ranked contributions")
    lorenz.set(
        xlabel="Anchors, ascending (%)",
        ylabel="Cumulative positive\ncontribution (%)",
        title="(b) Lorenz curves",
        xlim=(0, 100),
        ylim=(0, 100),
    )
    for axes in (ranked, lorenz):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "no lesion slides", transform=axes.transAxes, ha="center", color=FAINT)
    return figure
