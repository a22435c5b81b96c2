"""The main job: cohort → split → anchors → per seed judge → contributions → final → one tracked, plotted result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deco_ray.config import Config
from deco_ray.experiments.board import Board
from deco_ray.experiments.methods import DECO, Run
from deco_ray.experiments.outcome import as_judges, finished, read_predictions, results_frame
from deco_ray.experiments.pipeline_report import pipeline_sections
from deco_ray.experiments.session import absolute
from deco_ray.experiments.site import Site
from deco_ray.experiments.study import Study
from deco_ray.experiments.tracked import execute_tracked
from deco_ray.results.localisation import instances_checksum
from deco_ray.results.performance import PaperColumns, run_table
from deco_ray.results.statistics import class_changes, class_warnings
from deco_ray.results.tables import Table


@dataclass(frozen=True)
class PipelineResult:
    config: Config
    site: Site
    runs: list[Run]  # those that finished
    results: pd.DataFrame
    table: Table
    warnings: list[str]
    report: Path
    failures: dict[str, str]  # stage title -> why


def run_pipeline(config: Config, board: Board | None = None) -> PipelineResult:
    """Everything one configuration asks for; StageError only when no seed finished at all."""
    config = absolute(config)
    board = board or Board()
    study = Study(config)
    site = study.site(config)
    runs = study.add(config)
    study.runs = [*as_judges(runs), *runs]  # judge and final stand side by side in every result
    board.say(describe_data(site))
    title = f"{config.name}: {site.cohort.name}"
    tracked = execute_tracked(
        study,
        "pipeline",
        config.name,
        title,
        pipeline_params(config),
        lambda figures, folder: pipeline_sections(config, site, study, pipeline_table(config, study), figures, folder),
        board,
        notes=lambda: loss_warnings(site, finished(runs, study.sites), study.sites),
        settings={"instances": instances_checksum(site.cohort, config.report.instances)},
    )
    done = finished(runs, study.sites)
    frame = results_frame(finished(study.runs, study.sites), study.sites)
    return PipelineResult(
        config, site, done, frame, pipeline_table(config, study), tracked.notes, tracked.report, tracked.failures
    )


def pipeline_table(config: Config, study: Study) -> Table:
    frame = results_frame(finished(study.runs, study.sites), study.sites)
    methods = list(dict.fromkeys(frame["method"]))
    paper = None
    if config.paper.dataset:
        paper = PaperColumns(config.paper.dataset, config.paper.same_features, alias={"judge": config.judge.name})
    names = {"judge": f"judge ({config.judge.name})", DECO: f"DeCo final ({config.model.name})"}
    return study.site(config).explained(run_table(frame, methods=methods, names=names, paper=paper))


def loss_warnings(site: Site, runs: list[Run], sites: Mapping[str, Site]) -> list[str]:
    """Classes that lose more than their interval from judge to final (tail gains can cost another class)."""
    judges = as_judges(runs)
    if not judges:
        return []
    changes = class_changes(read_predictions(judges, sites), read_predictions(runs, sites), site.cohort.classes)
    return class_warnings(changes, site.split.counts(site.cohort, "test"))


def pipeline_params(config: Config) -> dict:
    """A dozen flat parameters to filter runs by; the whole tree goes along as a file."""
    return {
        "method": config.method,
        "judge": config.judge.name,
        "model": config.model.name,
        "seeds": len(config.seeds),
        "anchors.k": config.anchors.k,
        "anchors.k_normal": config.anchors.k_normal,
        "counterfactual.tau": config.counterfactual.tau,
        "masking.lam": config.masking.lam,
        "masking.r_max": config.masking.r_max,
        "pseudo_bags.m": config.pseudo_bags.m,
        "oversampling.alpha": config.oversampling.alpha,
        "training.epochs": config.training.epochs,
        "training.lr": config.training.lr,
    }


def describe_data(site: Site) -> str:
    sizes = {part: len(site.split.ids(part)) for part in ("train", "val", "test")}
    counts = ", ".join(f"{name} {count}" for name, count in zip(site.cohort.classes, site.train_counts))
    parts = f"{sizes['train']} training ({counts}), {sizes['val']} validation, {sizes['test']} test slides"
    return f"cohort {site.cohort.name}: {parts}"
