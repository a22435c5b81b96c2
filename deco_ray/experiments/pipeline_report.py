"""The report of a pipeline: tables, figures, analyses and heatmaps from what is on disk, as one artefact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from deco_ray.anchors.figure import anchor_figure
from deco_ray.artefacts import write_atomically
from deco_ray.config import Config
from deco_ray.counterfactual.table import read_table
from deco_ray.experiments.methods import DECO, Run
from deco_ray.experiments.outcome import (
    as_judges,
    finished,
    histories,
    model_folder,
    read_predictions,
    results_frame,
)
from deco_ray.experiments.patches import example_heatmaps, localisation_table
from deco_ray.experiments.site import Site
from deco_ray.experiments.study import Study
from deco_ray.results.canvas import save_figure
from deco_ray.results.figures import (
    class_change_figure,
    class_distribution,
    confusion_figure,
    group_f1_bars,
    training_curves,
)
from deco_ray.results.longtail import longtail_figure, longtail_table, nested_long_tail
from deco_ray.results.report import Block, Picture, Section, Text, Verdict
from deco_ray.results.run_files import read_metrics
from deco_ray.results.statistics import class_change_table, class_changes, compare_methods, verdict
from deco_ray.results.tables import Table

CURVES = {"loss": "Training loss", "val_macro_f1": "Validation macro-F1"}


def pipeline_sections(
    config: Config, site: Site, study: Study, table: Table, figures: Album, folder: Path
) -> list[Section]:
    """Results, and for DeCo what changed per class, the nested long tail and the patch-level evidence."""
    done = finished(study.runs, study.sites)
    runs = [run for run in done if run.method != "judge"]
    write_tables(folder, {"results": table})
    frame = results_frame(done, study.sites)
    sections = [results_section(site, runs, study.sites, frame, table, figures)]
    if runs[0].method == DECO:
        sections += [
            change_section(site, runs, study.sites, figures, folder),
            longtail_section(site, runs, figures, folder),
            evidence_section(config, site, runs[0], figures, folder),
        ]
    return sections


class Album:
    """Figures of a report, each also saved as PNG and, if wanted, as PDF."""

    def __init__(self, folder: Path, pdf: bool = True) -> None:
        self.folder, self.pdf = folder, pdf

    def picture(self, figure: Figure, name: str, caption: str) -> Picture:
        path = save_figure(figure, self.folder, name, self.pdf)
        kinds = ("png", "pdf") if self.pdf else ("png",)
        return Picture(path, caption, files=tuple(f"figures/{name}.{kind}" for kind in kinds))


def write_tables(folder: Path, tables: Mapping[str, Table]) -> None:
    """Each table as Markdown, CSV and LaTeX, to be put into a paper."""
    for name, table in tables.items():
        table.save(folder / "tables", name)


def results_section(
    site: Site, runs: list[Run], sites: Mapping[str, Site], frame: pd.DataFrame, table: Table, figures: Album
) -> Section:
    blocks: list[Block] = []
    series = {"judge": as_judges(runs), runs[0].method: runs}
    series = {name: found for name, found in series.items() if found}
    if len(series) == 2:
        predictions = {name: read_predictions(found, sites) for name, found in series.items()}
        comparisons = compare_methods(predictions, runs[0].method, site.groups)
        blocks.append(Verdict(verdict(comparisons, "macro_f1", {DECO: "DeCo-MIL"})))
        if any(entry.metric == "tail_f1" for entry in comparisons):
            blocks.append(Verdict(verdict(comparisons, "tail_f1", {DECO: "DeCo-MIL"})))
    curves = {name: list(histories(found, sites).values()) for name, found in series.items()}
    confusion = np.sum([read_metrics(model_folder(run, sites))["test"]["confusion"] for run in runs], axis=0)
    blocks += [
        table,
        figures.picture(group_f1_bars(frame), "group_f1", "Overall and group-wise F1 on the test slides, mean ± std."),
        figures.picture(training_curves(curves, CURVES), "curves", "All seeds; the mean in bold."),
        figures.picture(
            confusion_figure(confusion, site.cohort.classes),
            "confusion",
            f"Confusion of the final models on the test slides, summed over {len(runs)} seeds.",
        ),
        figures.picture(
            class_distribution(site.train_counts, site.cohort.classes, site.groups),
            "classes",
            "Training slides of each class: the class long tail.",
        ),
    ]
    return Section("Results", blocks)


def change_section(site: Site, runs: list[Run], sites: Mapping[str, Site], figures: Album, folder: Path) -> Section:
    changes = class_changes(
        read_predictions(as_judges(runs), sites), read_predictions(runs, sites), site.cohort.classes
    )
    table = class_change_table(changes, site.train_counts, site.split.counts(site.cohort, "test"))
    write_tables(folder, {"class_changes": table})
    caption = "Change of each class's F1 from judge to final, with its 95 % interval over test slides."
    return Section("Per class", [table, figures.picture(class_change_figure(changes), "class_changes", caption)])


def longtail_section(site: Site, runs: list[Run], figures: Album, folder: Path) -> Section:
    """The nested long tail of evidence (supplement, D.2), one analysis per seed's contributions."""
    analyses = [
        nested_long_tail(read_table(site.store.path("contributions", run.contributions)), site.groups)
        for run in runs
        if run.contributions is not None and site.store.exists("contributions", run.contributions)
    ]
    if not analyses:
        return Section("Nested long tail", [Text("The contribution tables are no longer in the storage folder.")])
    table = longtail_table(analyses)
    write_tables(folder, {"longtail": table})
    write_atomically(folder / "longtail.json", "[" + ",\n".join(found.as_json() for found in analyses) + "]")
    caption = "Ranked contributions of anchors and their Lorenz curves, by frequency group of the slide's class."
    return Section("Nested long tail", [table, figures.picture(longtail_figure(analyses), "longtail", caption)])


def evidence_section(config: Config, site: Site, run: Run, figures: Album, folder: Path) -> Section:
    """Anchors, how well contributions find known lesions, and heatmaps of tail-class test slides."""
    blocks: list[Block] = []
    anchors = site.store.path("anchors", run.anchors or "")
    if anchors.exists():
        caption = "Anchors: size, class composition, and a map with their matched normal prototypes."
        blocks.append(figures.picture(anchor_figure(anchors, site.cohort), "anchors", caption))
    table = localisation_table(config, site, run)
    if table is not None:
        write_tables(folder, {"localisation": table})
        blocks.append(table)
    for slide, picture in example_heatmaps(config, site, run, folder / "heatmaps"):
        blocks.append(Picture(picture, f"{slide}: what the judge of seed {run.seed} sees", (f"heatmaps/{slide}.pdf",)))
    return Section("Evidence", blocks)
