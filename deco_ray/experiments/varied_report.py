"""Tables, figures and verdicts of variant files on one cohort or several: what sweep, compare and plan reports show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deco_ray.experiments.pipeline_report import Album, write_tables
from deco_ray.experiments.varied import Varied, method_label
from deco_ray.results.figures import group_f1_bars, imbalance_figure, sweep_figure
from deco_ray.results.performance import METRICS, comparison_table
from deco_ray.results.report import Block, Section, Text, Verdict
from deco_ray.results.statistics import compare_methods, comparison_statistics_table, verdict
from deco_ray.results.tables import Table

SHOWN = ("macro_f1", "tail_f1")  # what the paper's figures show


def varied_section(name: str, cohorts: Mapping[str, Varied], figures: Album, folder: Path) -> Section:
    """One item: a table per cohort with the paper's figures beside ours, its figure, and what the data support."""
    file = next(iter(cohorts.values())).file
    blocks: list[Block] = []
    for cohort, varied in cohorts.items():
        if not varied.done():
            blocks.append(Text(f"{cohort}: no run finished."))
            continue
        prefix = f"{name}_{cohort}"
        table = varied_table(varied)
        write_tables(folder, {prefix: table})
        if file.kind in ("ablation", "comparison"):
            blocks += comparison_blocks(prefix, varied, table, figures, folder)
        else:
            blocks.append(table)
    if file.axis is not None:
        blocks.insert(0, axis_picture(name, cohorts, figures))
    return Section(file.title, blocks)


def varied_table(varied: Varied) -> Table:
    table = comparison_table(
        varied.results(),
        methods=list(varied.done()),
        names=varied.labels(),
        metrics=METRICS,
        paper=varied.paper(),
        caption=f"{varied.file.title}: {varied.site.cohort.name}",
        header=varied.header(),
    )
    splits = {run.site for runs in varied.runs.values() for run in runs}
    # along an axis of splits a class may change its group
    return varied.sites[splits.pop()].explained(table) if len(splits) == 1 else table


def comparison_blocks(prefix: str, varied: Varied, table: Table, figures: Album, folder: Path) -> list[Block]:
    names, labels = list(varied.done()), varied.labels()
    blocks: list[Block] = []
    reference = varied.file.reference_name
    if reference in names and len(names) > 1:
        comparisons = compare_methods(varied.predictions(), reference, varied.site.groups, metrics=SHOWN)
        found = {entry.metric for entry in comparisons}
        blocks += [Verdict(verdict(comparisons, metric, labels)) for metric in SHOWN if metric in found]
        statistics = comparison_statistics_table(comparisons, labels)
        write_tables(folder, {f"{prefix}_statistics": statistics})
        blocks += [table, statistics]
    else:
        blocks.append(table)
    bars = group_f1_bars(varied.results(), methods=names, names=labels)
    blocks.append(figures.picture(bars, f"{prefix}_group_f1", "Overall and group-wise F1, mean ± std over seeds."))
    return blocks


def axis_picture(name: str, cohorts: Mapping[str, Varied], figures: Album) -> Block:
    """Curves over the axis: a panel per cohort, or Figure 4's two panels when methods cross the axis."""
    done = {cohort: varied for cohort, varied in cohorts.items() if varied.done()}
    if not done:
        return Text("No run finished, so there is no figure.")
    first = next(iter(done.values()))
    if first.file.methods:
        labels = {method: method_label(method, first.config) for method in first.file.methods}
        figure = imbalance_figure(first.curves(), names=labels, gain_of="deco" if "deco" in labels else None)
        return figures.picture(figure, name, "Macro-F1 and Tail-F1 over the imbalance ratio, mean ± std over seeds.")
    panels = {
        cohort: {metric: scores for metric, scores in varied.curves()[""].items() if metric in SHOWN}
        for cohort, varied in done.items()
    }
    axis = first.file.axis_label or first.file.axis or ""
    defaults = {varied.default() for varied in done.values()}
    default = defaults.pop() if len(defaults) == 1 else None
    figure = sweep_figure(panels, setting=axis, default=default)
    return figures.picture(figure, name, f"Mean ± std over seeds; the dashed line marks the default {axis}.")
