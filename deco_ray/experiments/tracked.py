"""What every study does around its execution: a tracked parent, live children, a report at the end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deco_ray.artefacts import digest, write_atomically
from deco_ray.errors import StageError
from deco_ray.experiments.board import Board
from deco_ray.experiments.outcome import RESULTS, finished, results_frame
from deco_ray.experiments.pipeline_report import Album
from deco_ray.experiments.provenance import config_yaml, provenance, resume_warnings
from deco_ray.experiments.recorder import Recorder
from deco_ray.experiments.study import Study
from deco_ray.results.performance import summarise
from deco_ray.results.redact import redact_tree
from deco_ray.results.report import Section, Verdict, build_report
from deco_ray.results.tracking import Tracker

REPORT = "report"
VERDICTS = "verdicts.json"
LAYOUT = 4  # raise it when the pages change, so that finished reports are built again
Sections = Callable[[Album, Path], list[Section]]


@dataclass(frozen=True)
class Tracked:
    report: Path
    notes: list[str]  # what a reader of the results must know
    failures: dict[str, str]  # stage title -> why
    verdicts: list[str]  # what the data support, as the report says it


def execute_tracked(
    study: Study,
    kind: str,
    name: str,
    title: str,
    params: Mapping[str, Any],
    sections: Sections,
    board: Board,
    *,
    notes: Callable[[], list[str]] = list,
    settings: Mapping[str, Any] | None = None,
) -> Tracked:
    """Run a pipeline, sweep, comparison or plan as one tracked run with a report.

    The report is an artefact of the runs it shows, of the `notes` found in them, of the study's configuration and of
    whatever else it is drawn from (`settings`: variant files, the contents of data files).
    """
    site = next(iter(study.sites.values()))
    for note in study.warnings:
        board.say(f"note: {note}")
    tracker = Tracker.open(study.base.tracking, Path(study.base.storage), site.cohort)
    if study.missing():
        tracker.warm_up()
    key = digest({"kind": kind, "title": title, "runs": sorted({run.model for run in study.runs})})
    parent = tracker.parent(name, kind, key, params)
    recorder = Recorder(tracker, parent, study.sites)
    try:
        study.execute(board, [recorder])
        recorder.catch_up(study.graph, study.failures)
        failures = {study.graph.stages[stage].title: why for stage, why in study.failures.items()}
        done = finished(study.runs, study.sites)
        if all(run.method == "judge" for run in done):  # judges alone are no result of what was asked for
            causes = "\n".join(f"  {stage}: {why}" for stage, why in failures.items())
            raise StageError(f"no run finished:\n{causes}")
        told = [*study.warnings, *notes(), *resume_warnings(done, study.sites)]
        told = list(dict.fromkeys([*told, *(f"{stage} failed: {why}" for stage, why in failures.items())]))
        report = _report(study, kind, title, told, sections, settings or {}, board)
        recorder.submit(lambda: _log(parent, study, report))
    except BaseException as error:  # Ctrl-C and `ray job stop` included: the page must not say it still runs
        recorder.close()
        parent.finish("FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    recorder.close()
    parent.finish("FAILED" if failures else "FINISHED")
    return Tracked(report, told, failures, json.loads((report.parent / VERDICTS).read_text()))


def _report(
    study: Study,
    kind: str,
    title: str,
    notes: list[str],
    sections: Sections,
    settings: Mapping[str, Any],
    board: Board,
) -> Path:
    site = next(iter(study.sites.values()))
    done = finished(study.runs, study.sites)
    runs = [[run.method, run.setting, run.seed, run.model] for run in done]
    inputs = {"layout": LAYOUT, "kind": kind, "title": title, "runs": runs, "notes": notes, **settings}
    inputs = redact_tree({**inputs, "config": study.base.model_dump(mode="json")})  # the artefact's record keeps them
    key = digest(inputs)
    reused, begun = site.store.is_whole(REPORT, key), time.monotonic()
    if not reused:
        shutil.rmtree(site.store.path(REPORT, key), ignore_errors=True)  # of which somebody removed a file
        with site.store.writing(REPORT, key, inputs) as folder:
            body = sections(Album(folder / "figures", study.base.report.pdf), folder)
            page = folder / "report.html"
            build_report(page, title, body, provenance(site), config_yaml(study.base), notes, subtitle=subtitle(study))
            results_frame(done, study.sites).to_parquet(folder / RESULTS, index=False)
            write_atomically(folder / "config.yaml", config_yaml(study.base))
            verdicts = [block.text for section in body for block in section.blocks if isinstance(block, Verdict)]
            write_atomically(folder / VERDICTS, json.dumps(verdicts))
    board.stage("report", "", time.monotonic() - begun, reused)
    return site.store.path(REPORT, key) / "report.html"


def subtitle(study: Study) -> str:
    cohorts = dict.fromkeys(site.cohort.name for site in study.sites.values())
    return f"{len({run.seed for run in study.runs})} seeds; {', '.join(cohorts)}"


def _log(parent: Any, study: Study, report: Path) -> None:
    frame = results_frame(finished(study.runs, study.sites), study.sites)
    summary = summarise(frame)
    values = {
        f"{method}/{metric}": score.mean for (method,), scores in summary.items() for metric, score in scores.items()
    }
    values |= {
        f"{method}/{metric}_std": score.std
        for (method,), scores in summary.items()
        for metric, score in scores.items()
        if score.std is not None
    }
    parent.log_metrics(values)
    parent.log_config(study.base.model_dump(mode="json"))
    parent.log_table(frame, "results")
    parent.log_file(report)
    for folder, pattern in (("figures", "*.png"), ("tables", "*.*")):
        for path in sorted((report.parent / folder).glob(pattern)):
            parent.log_file(path, folder)
    parent.describe(f"Report: `{report}`")
