"""The figures of a run, a comparison, a sweep and a study; each returns a Figure for `save_figure` or the report.

Scores come in as fractions and are drawn in percent; spread is the sample standard deviation over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import ScaledTranslation

from deco_ray.results.canvas import (
    COLUMN,
    FAINT,
    GROUP_COLOURS,
    INK,
    MARKERS,
    PAGE,
    colour,
    metric_name,
    new_figure,
    styled,
)
from deco_ray.results.performance import summarise
from deco_ray.results.statistics import ClassChange
from deco_ray.results.tables import estimate

GROUP_METRICS = ("macro_f1", "head_f1", "medium_f1", "tail_f1")
APART, SPREAD = 5.0, 8.0  # points between neighbouring series of error bars, and between the outermost at most
Scores = Mapping[Any, Sequence[float]]  # setting -> one score per seed


@styled
def group_f1_bars(
    results: pd.DataFrame, *, methods: Sequence[str] | None = None, names: Mapping[str, str] | None = None
) -> Figure:
    """Figure 3: overall and group-wise F1 per method, mean ± std; results as in `performance`."""
    summary = summarise(results)
    order = list(methods) if methods is not None else [name for (name,) in summary]
    metrics = [m for m in GROUP_METRICS if any(m in summary.get((name,), {}) for name in order)]
    figure, (axes,) = new_figure(COLUMN if len(order) <= 3 else PAGE, 2.5)
    width = 0.8 / max(1, len(order))
    for number, name in enumerate(order):
        cells = [summary.get((name,), {}).get(metric) for metric in metrics]
        place = np.arange(len(metrics)) + (number - (len(order) - 1) / 2) * width
        heights = [cell.mean if cell else 0.0 for cell in cells]
        spread = [cell.std or 0.0 if cell else 0.0 for cell in cells]
        axes.bar(
            place,
            heights,
            width * 0.92,
            color=colour(number),
            edgecolor="white",
            linewidth=0.4,
            hatch=None if number < 8 else "///",  # the palette repeats after eight
            label=(names or {}).get(name, name),
        )
        lower = np.minimum(spread, heights)  # an F1 is never below zero
        axes.errorbar(place, heights, np.stack([lower, spread]), fmt="none", ecolor=INK, elinewidth=0.7)
    axes.set_xticks(range(len(metrics)), [metric_name(metric) for metric in metrics])
    axes.set_ylabel("F1 (%)")
    axes.grid(axis="x", visible=False)
    figure.legend(loc="outside upper center", ncols=min(6, max(1, len(order))))
    return figure


@styled
def training_curves(
    histories: Mapping[str, Sequence[pd.DataFrame]], columns: Mapping[str, str], epoch: str = "epoch"
) -> Figure:
    """Epoch curves of all seeds: a panel per column {name in history: axis label}, a colour per stage, mean in bold.

    Histories count epochs from 0, people from 1.
    """
    figure, panels = new_figure(PAGE if len(columns) > 1 else COLUMN, 2.3, 1, len(columns))
    for axes, (column, label) in zip(panels, columns.items()):
        for number, (stage, runs) in enumerate(histories.items()):
            known = [run[[epoch, column]].dropna() for run in runs if column in run]
            for run in known:
                axes.plot(run[epoch] + 1, run[column], color=colour(number), linewidth=0.6, alpha=0.4)
            if known:
                mean = pd.concat(known).groupby(epoch)[column].mean()
                name = f"{stage} ({len(known)} seeds)"
                axes.plot(mean.index + 1, mean, color=colour(number), linewidth=1.7, label=name)
        axes.set(xlabel="Epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _shared_legend(figure, panels)
    return figure


@styled
def confusion_figure(counts: np.ndarray, class_names: Sequence[str], title: str = "") -> Figure:
    """Counts [true, predicted] (sum or mean over seeds), shaded by the share of each true class."""
    counts = np.asarray(counts, dtype=float)
    size = len(class_names)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = max(COLUMN, 0.55 * size + 1.3)
    figure, (axes,) = new_figure(side, side * 0.86)
    image = axes.imshow(100 * share, cmap="Blues", vmin=0, vmax=100)
    for row in range(size):
        for column in range(size):
            ink = "white" if share[row, column] > 0.55 else INK
            text = f"{counts[row, column]:.0f}" if counts[row, column] == round(counts[row, column]) else None
            axes.text(column, row, text or f"{counts[row, column]:.1f}", ha="center", va="center", color=ink)
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right"} if max(map(len, class_names)) > 6 else {}
    axes.set_xticks(range(size), class_names, **slanted)
    axes.set_yticks(range(size), class_names)
    axes.set(xlabel="Predicted", ylabel="True", title=title)
    axes.grid(visible=False)
    figure.colorbar(image, ax=axes, shrink=0.8, label="Share of the true class (%)")
    return figure


@styled
def sweep_figure(
    panels: Mapping[str, Mapping[str, Scores]], *, setting: str, default: Any = None, errors: bool = True
) -> Figure:
    """Sensitivity: a panel per cohort, a line per metric over the setting's values, mean ± std, the default marked.

    panels: {cohort: {metric: {value: scores of the seeds}}}; values that are not numbers are drawn in given order.
    """
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes_list = new_figure(COLUMN if columns == 1 else PAGE, 2.4 * rows, rows, columns)
    for axes in axes_list[len(panels) :]:
        axes.set_axis_off()
    for axes, (cohort, lines) in zip(axes_list, panels.items()):
        for number, (metric, scores) in enumerate(lines.items()):
            _line(axes, scores, number, len(lines), metric_name(metric), errors)
        values = list(next(iter(lines.values()), {}))
        place = _places(values)
        if default in values:
            _mark_default(axes, place[values.index(default)], default)
        axes.set_xticks(place, [str(value) for value in values])
        axes.set(xlabel=setting, ylabel="Score (%)", title=cohort if len(panels) > 1 else "")
    _shared_legend(figure, axes_list[: len(panels)])
    return figure


def _mark_default(axes: Axes, place: float, default: Any) -> None:
    axes.axvline(place, color=FAINT, linewidth=0.9, linestyle="--", zorder=0)
    axes.annotate(
        f"default {default}",
        (place, 0.03),
        (-2 - APART, 0),  # clear of the series beside it
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        fontsize=6.5,
        color="#666666",
    )


def _places(values: Sequence[Any]) -> list[float]:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return [float(value) for value in values]
    return [float(index) for index in range(len(values))]


def _line(axes: Axes, scores: Scores, number: int, count: int, label: str, errors: bool = True) -> None:
    """Series `number` of `count`, each a little beside the others on paper: error bars at one value stay readable."""
    values = list(scores)
    cells = [estimate(list(scores[value]), 100) for value in values]
    known = [(place, cell) for place, cell in zip(_places(values), cells) if cell is not None]
    drawn = axes.errorbar(
        [place for place, _ in known],
        [cell.mean for _, cell in known],
        [cell.std or 0.0 for _, cell in known] if errors else None,
        color=colour(number),
        marker=MARKERS[number % len(MARKERS)],
        elinewidth=0.8,
        label=label,
    )
    step = min(APART, SPREAD / max(1, count - 1))
    inches = (number - (count - 1) / 2) * step / 72
    beside = axes.transData + ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
    for artist in drawn.get_children():
        artist.set_transform(beside)


def _shared_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend above all panels, each name once."""
    handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(5, len(handles)))


@styled
def imbalance_figure(
    studies: Mapping[str, Mapping[str, Scores]], *, names: Mapping[str, str] | None = None, gain_of: str | None = None
) -> Figure:
    """Figure 4: (a) macro-F1 and (b) Tail-F1 over imbalance ratios, {method: {metric: {ratio: scores}}}.

    `gain_of` writes that method's Tail-F1 gain over the first method, in percentage points, at every ratio.
    """
    figure, panels = new_figure(PAGE, 2.4, 1, 2)
    for axes, metric, letter in zip(panels, ("macro_f1", "tail_f1"), "ab"):
        for number, (method, metrics) in enumerate(studies.items()):
            _line(axes, metrics.get(metric, {}), number, len(studies), (names or {}).get(method, method))
        ratios = sorted({ratio for metrics in studies.values() for ratio in metrics.get(metric, {})})
        axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
        axes.set(
            xlabel="Imbalance ratio", ylabel=f"{metric_name(metric)} (%)", title=f"({letter}) {metric_name(metric)}"
        )
    first = next(iter(studies))
    if gain_of is not None and gain_of != first:
        _write_gains(panels[1], studies[first].get("tail_f1", {}), studies[gain_of].get("tail_f1", {}))
    _shared_legend(figure, panels)
    return figure


def _write_gains(axes: Axes, base: Scores, better: Scores) -> None:
    for ratio, scores in better.items():
        after, before = estimate(list(scores), 100), estimate(list(base.get(ratio, ())), 100)
        if after and before:
            top = max(after.mean + (after.std or 0), before.mean + (before.std or 0))
            gain = f"{after.mean - before.mean:+.1f}".replace("-", "−")
            axes.annotate(
                gain, (ratio, top), (0, 3), textcoords="offset points", ha="center", fontsize=7, color="#7b3294"
            )
    axes.margins(x=0.08, y=0.14)


@styled
def class_distribution(
    train_counts: Sequence[int], class_names: Sequence[str], groups: Mapping[str, Sequence[int]]
) -> Figure:
    """The class long tail: training slides per class, head to tail, coloured by frequency group."""
    order = sorted(range(len(train_counts)), key=lambda label: (-train_counts[label], label))
    member = {label: group for group, labels in groups.items() for label in labels}
    figure, (axes,) = new_figure(max(COLUMN, 0.45 * len(order) + 1), 2.4)
    seen: set[str] = set()
    for place, label in enumerate(order):
        group = member.get(label, "")
        name = None if group in seen else group.capitalize()
        seen.add(group)
        bars = axes.bar(place, train_counts[label], 0.7, color=GROUP_COLOURS.get(group, FAINT), label=name)
        axes.bar_label(bars, [f"{train_counts[label]:,}"], padding=1, fontsize=7)
    ratio = max(train_counts) / max(1, min(train_counts))
    long_names = max(len(name) for name in class_names) > 8
    axes.set_xticks(
        range(len(order)),
        [class_names[label] for label in order],
        rotation=25 if long_names else 0,
        ha="right" if long_names else "center",
    )
    axes.set(ylabel="Training slides", title=f"Imbalance ratio {ratio:.1f}")
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    axes.legend()
    return figure


@styled
def class_change_figure(changes: Sequence[ClassChange]) -> Figure:
    """F1 of every class from judge to final with its 95 % interval; losses beyond the interval stand out."""
    figure, (axes,) = new_figure(COLUMN, 0.34 * len(changes) + 0.9)
    for place, change in enumerate(changes):
        middle = 100 * change.change
        # a percentile interval of a skewed draw may leave the estimate outside: never draw a negative length
        spread = np.maximum([[middle - 100 * change.low], [100 * change.high - middle]], 0)
        ink = "#D55E00" if change.lost else "#0072B2" if change.low > 0 else FAINT
        axes.errorbar(middle, place, xerr=spread, fmt="s" if change.lost else "o", color=ink, elinewidth=1.2)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(changes)), [change.name for change in changes])
    axes.set_ylim(len(changes) - 0.5, -0.5)
    axes.set_xlabel("Change of F1, judge to final (points)")
    axes.grid(axis="y", visible=False)
    return figure
