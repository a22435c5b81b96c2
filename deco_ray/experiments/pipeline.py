"""The main job: cohort → split → anchors → per seed judge → contributions → final → one tracked, plotted result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deco_ray.artefacts import digest
from deco_ray.config import Config
from deco_ray.errors import StageError
from deco_ray.experiments.board import Board
from deco_ray.experiments.methods import DECO, Run
from deco_ray.experiments.outcome import as_judges, finished, read_predictions, results_frame
from deco_ray.experiments.pipeline_report import build_pipeline_report
from deco_ray.experiments.provenance import resume_warnings
from deco_ray.experiments.recorder import Recorder
from deco_ray.experiments.session import absolute
from deco_ray.experiments.site import Site
from deco_ray.experiments.study import Study
from deco_ray.results.performance import PaperColumns, run_table
from deco_ray.results.statistics import class_changes, class_warnings
from deco_ray.results.tables import Table
from deco_ray.results.tracking import Tracker

UNREAD = {"name", "resources", "tracking", "storage", "cohort", "synthetic", "paper", "report"}  # decide no number


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
    """Everything one configuration asks for; raises StageError only when no seed finished at all."""
    config = absolute(config)
    board = board or Board()
    study = Study(config)
    site = study.site(config)
    for note in site.warnings:
        board.say(f"note: {note}")
    runs = study.add(config)
    board.say(describe_data(site))
    tracker = Tracker.open(config.tracking, Path(config.storage), site.cohort)
    name = pipeline_digest(config, site)
    if study.missing():
        tracker.warm_up()
    parent = tracker.parent(config.name, "pipeline", name, pipeline_params(config), {"deco.split": site.split.name})
    recorder = Recorder(tracker, parent, study.sites)
    try:
        study.execute(board, [recorder])
        recorder.catch_up(study.graph, study.failures)
        result = conclude(config, study, site, runs, name, board)
        recorder.submit(lambda: log_parent(parent, result))
    finally:
        recorder.close()
    parent.finish("FAILED" if result.failures else "FINISHED")
    return result


def conclude(config: Config, study: Study, site: Site, runs: list[Run], name: str, board: Board) -> PipelineResult:
    """Tables, warnings and the report from what is on disk."""
    done = finished(runs, study.sites)
    failures = {study.graph.stages[key].title: why for key, why in study.failures.items()}
    if not done:
        causes = "\n".join(f"  {title}: {why}" for title, why in failures.items())
        raise StageError(f"no seed finished:\n{causes}")
    frame = pipeline_frame(done, study.sites)
    table = pipeline_table(config, frame)
    notes = [*site.warnings, *loss_warnings(site, done, study.sites), *resume_warnings(done, study.sites)]
    notes += [f"{title} failed: {why}" for title, why in failures.items()]
    begun = time.monotonic()
    report, reused = build_pipeline_report(config, site, done, study.sites, frame, table, notes, name)
    board.stage("report", "", time.monotonic() - begun, reused)
    return PipelineResult(config, site, done, frame, table, notes, report, failures)


def pipeline_frame(runs: list[Run], sites: dict[str, Site]) -> pd.DataFrame:
    """Results with DeCo's judges as a method of their own, so that judge and final stand side by side."""
    return results_frame([*as_judges(runs), *runs], sites)


def pipeline_table(config: Config, frame: pd.DataFrame) -> Table:
    methods = list(dict.fromkeys(frame["method"]))
    paper = None
    if config.paper.dataset:
        alias = {"judge": config.judge.name}
        paper = PaperColumns(config.paper.dataset, config.paper.same_features, alias=alias)
    names = {"judge": f"judge ({config.judge.name})", DECO: f"DeCo final ({config.model.name})"}
    return run_table(frame, methods=methods, names=names, paper=paper)


def loss_warnings(site: Site, runs: list[Run], sites: dict[str, Site]) -> list[str]:
    """Classes that lose more than their interval from judge to final (tail gains can cost another class)."""
    judges = as_judges(runs)
    if not judges:
        return []
    changes = class_changes(read_predictions(judges, sites), read_predictions(runs, sites), site.cohort.classes)
    return class_warnings(changes, site.split.counts(site.cohort, "test"))


def pipeline_digest(config: Config, site: Site) -> str:
    return digest({"config": config.model_dump(mode="json", exclude=UNREAD), "split": site.split.digest})


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


def log_parent(parent, result: PipelineResult) -> None:
    """The parent's page in MLflow: means, the table, figures, the report."""
    means = result.results.groupby(["method", "metric"])["value"].agg(["mean", "std"])
    values = {}
    for (method, metric), row in means.iterrows():
        values[f"{method}/{metric}"] = float(row["mean"])
        values[f"{method}/{metric}_std"] = float(row["std"])
    parent.log_metrics(values)
    parent.log_config(result.config.model_dump(mode="json"))
    parent.log_table(result.results, "results")
    parent.log_file(result.report)
    for figure in sorted((result.report.parent / "figures").glob("*.png")):
        parent.log_file(figure, "figures")
    parent.describe(f"Report: `{result.report}`\n\n{result.table.markdown()}")
