"""Tables of scores: mean ± std over seeds, the paper's figures beside ours.

Results: a frame with one row per (method, seed, metric) and the score as a fraction in `value`; tables show percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from deco_ray.results.canvas import metric_name
from deco_ray.results.paper import COMPARISON, PAPER_ROWS, paper_note, paper_value
from deco_ray.results.tables import Column, Estimate, Table, estimate

METRICS = ("acc", "auc", "macro_f1", "head_f1", "medium_f1", "tail_f1")
LOWER_IS_BETTER = {"ece"}


@dataclass(frozen=True)
class PaperColumns:
    """Which figures of the paper to print beside ours, and whether the features are the paper's."""

    dataset: str
    same_features: bool
    table: str = COMPARISON
    alias: Mapping[str, str] = field(default_factory=dict)  # e.g. {"judge": "abmil", "final": "deco"}

    def value(self, name: str, metric: str) -> Estimate | None:
        return paper_value(self.table, self.dataset, self.alias.get(name, name), metric)

    def row(self, name: str) -> str:
        """The paper's own name of the row."""
        name = self.alias.get(name, name)
        return PAPER_ROWS.get(self.table, {}).get(name, name)


def summarise(results: pd.DataFrame, by: Sequence[str] = ("method",)) -> dict[tuple[str, ...], dict[str, Estimate]]:
    """Mean ± sample std over seeds in percent, for each combination of `by`, for each metric with finite scores."""
    summary: dict[tuple[str, ...], dict[str, Estimate]] = {}
    for key, part in results.groupby([*by, "metric"], sort=False):
        *names, metric = (str(item) for item in key)
        score = estimate(part["value"].tolist(), 100)
        if score is not None:
            summary.setdefault(tuple(names), {})[metric] = score
    return summary


def comparison_table(
    results: pd.DataFrame,
    *,
    methods: Sequence[str] | None = None,
    names: Mapping[str, str] | None = None,
    metrics: Sequence[str] = METRICS,
    paper: PaperColumns | None = None,
    caption: str = "",
    header: str = "Method",
) -> Table:
    """A row per method (or setting), a column per metric; the paper's columns follow ours where it reports them."""
    summary = summarise(results)
    order = list(methods) if methods is not None else [name for (name,) in summary]
    metrics = [metric for metric in metrics if any(metric in summary.get((name,), {}) for name in order)]
    columns = [Column(header), *(_column(metric, "ours" if paper else "") for metric in metrics)]
    published: dict[str, dict[str, Estimate | None]] = {}
    if paper:
        for metric in metrics:
            values = {name: paper.value(name, metric) for name in order}
            if any(values.values()):
                published[metric] = values
        columns += [_column(metric, "paper") for metric in published]
    rows = [
        [
            _name(name, names, paper),
            *(summary.get((name,), {}).get(metric) for metric in metrics),
            *(values[name] for values in published.values()),
        ]
        for name in order
    ]
    return Table(tuple(columns), rows, caption, _note(results, paper))


def run_table(
    results: pd.DataFrame,
    *,
    methods: Sequence[str],
    names: Mapping[str, str] | None = None,
    metrics: Sequence[str] = METRICS,
    paper: PaperColumns | None = None,
    caption: str = "",
) -> Table:
    """The end of a run: a row per metric, methods side by side, the paper's columns beside them."""
    summary = summarise(results)
    published = [n for n in methods if any(paper.value(n, metric) for metric in metrics)] if paper else []
    columns = [Column("Metric (%)"), *(Column(_name(name, names, paper)) for name in methods)]
    columns += [Column(paper.row(name), group="paper") for name in published if paper]
    rows = []
    for metric in metrics:
        ours = [summary.get((name,), {}).get(metric) for name in methods]
        if any(ours):
            rows.append([metric_name(metric), *ours, *(paper.value(name, metric) for name in published if paper)])
    return Table(tuple(columns), rows, caption, _note(results, paper))


def _column(metric: str, group: str) -> Column:
    return Column(metric_name(metric), best="low" if metric in LOWER_IS_BETTER else "high", group=group)


def _name(name: str, names: Mapping[str, str] | None, paper: PaperColumns | None) -> str:
    if names and name in names:
        return names[name]
    return PAPER_ROWS[paper.table if paper else COMPARISON].get(name, name)


def _note(results: pd.DataFrame, paper: PaperColumns | None) -> str:
    seeds = results["seed"].nunique()
    spread = f"Percent, mean ± sample std (ddof 1) over {seeds} seeds." if seeds > 1 else "Percent, one seed."
    return f"{spread} {paper_note(paper.same_features)}" if paper else spread
