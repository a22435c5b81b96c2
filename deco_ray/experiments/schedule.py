"""One Tune experiment walks the stage graph: every stage a trial, started when what it needs exists.

Tune places trials, counts resources and restarts those whose process died. A stage that fails for a reason of
its own is not tried again, only its dependants are left out. Nothing of Tune's state is kept: artefacts on
disk make the same command go on where it was.
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import tune
from ray.exceptions import RayError, RayTaskError
from ray.tune.search import Searcher

from deco_ray.config import ResourceSection
from deco_ray.counterfactual.scoring import ensure_contributions
from deco_ray.errors import DecoError
from deco_ray.experiments.session import concurrent_runs
from deco_ray.experiments.site import Site
from deco_ray.experiments.stages import Progress, ScoreStage, Stage, TrainStage
from deco_ray.training.runner import run_training


class Listener(Protocol):
    """Hears what happens, in the driver: the progress board and the tracker."""

    def started(self, stage: Stage) -> None: ...
    def advanced(self, stage: Stage, metrics: dict[str, Any]) -> None: ...
    def finished(self, stage: Stage, seconds: float) -> None: ...
    def failed(self, stage: Stage, why: str) -> None: ...


@dataclass(frozen=True)
class Workplace:
    """What every trial needs, sent once through the object store."""

    stages: Mapping[str, Stage]
    sites: Mapping[str, Site]  # by the digest of the split
    sources: Mapping[str, Any]  # by cohort checksum: features in shared memory, or how to stream them
    resources: ResourceSection
    report_every_s: float = 1.0  # a report holds its trial up by a tenth of a second, which is many a short epoch


def run_stages(
    missing: Mapping[str, Stage], place: Workplace, folder: Path, listeners: list[Listener]
) -> dict[str, str]:
    """Run the stages side by side; returns {digest: why} of those that failed or were left out."""
    if not missing:
        return {}
    progress = Progress(dict(missing))
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # our artefacts are the record
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "3600"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # its banner comes even at verbose=0
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(run_stage, place=place),
            lambda config: placement(missing[config["stage"]], place.resources),
        ),
        tune_config=tune.TuneConfig(
            search_alg=StageSearcher(progress),
            num_samples=-1,
            reuse_actors=True,
            max_concurrent_trials=concurrency(place.resources),
        ),
        run_config=tune.RunConfig(
            name="stages",
            storage_path=str(folder),
            verbose=0,
            callbacks=[Announcer(missing, progress, listeners)],
            failure_config=tune.FailureConfig(max_failures=place.resources.max_failures),
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if progress.unfinished():
        raise KeyboardInterrupt  # Tune takes the signal, ends its trials and returns as if all were done
    for stage in progress.pending.values():
        progress.failed[stage.digest] = "left out: a stage it needs failed"
    return progress.failed


def concurrency(resources: ResourceSection) -> int | None:
    """A limit where Tune cannot count by itself: data-parallel workers are reserved by Ray Train, outside the trial."""
    if resources.workers_per_run > 1:
        return concurrent_runs(resources, ray.nodes())
    return resources.max_concurrent


def placement(stage: Stage, resources: ResourceSection) -> tune.PlacementGroupFactory:
    """What a trial reserves; with one worker all of it lives inside, so Tune's count is the whole truth."""
    unit = {"CPU": resources.cpus_per_run} | ({"GPU": resources.gpus_per_run} if resources.gpus_per_run else {})
    if isinstance(stage, ScoreStage) and resources.scorers > 1:
        return tune.PlacementGroupFactory([{}, *[unit] * resources.scorers])  # the trial itself only leads
    if isinstance(stage, TrainStage) and resources.workers_per_run > 1:
        # Ray Train reserves its workers itself; the trial may hold no CPU, or the last run would wait for its own
        return tune.PlacementGroupFactory([{"memory": 1}])
    return tune.PlacementGroupFactory([unit])


def run_stage(config: dict[str, Any], place: Workplace) -> None:
    """A trial: make one artefact, report its epochs."""
    reports = Reports(place.report_every_s)
    try:
        make(place.stages[config["stage"]], place, reports)
        reports.send()
    except RayError as error:
        if not isinstance(error, RayTaskError):
            raise  # a process or node died: Tune starts the trial again and it resumes
        reports.send(failure=describe(error))
    except Exception as error:
        reports.send(failure=describe(error))


class Reports:
    """A trial's epochs on their way to the driver: every one arrives, several together where they are short."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.sent = every_s, float("-inf")
        self.waiting: list[dict[str, Any]] = []

    def __call__(self, metrics: dict[str, Any]) -> None:
        self.waiting.append(metrics)
        if time.monotonic() - self.sent >= self.every_s:
            self.send()

    def send(self, **more: Any) -> None:
        if self.waiting or more:
            tune.report({"rows": self.waiting, **more})
            self.waiting, self.sent = [], time.monotonic()


def make(stage: Stage, place: Workplace, report: Callable[[dict[str, Any]], None]) -> None:
    """The artefact of one stage, made in this process (or in actors of this trial's placement group)."""
    site = place.sites[stage.site]
    with site.store.explaining():
        if isinstance(stage, TrainStage):
            source = place.sources[site.cohort.checksum]
            run_training(stage.spec, site.cohort, site.split, site.store, place.resources, source, report=report)
        else:
            _score(stage, site, place.resources, report)


def _score(stage: ScoreStage, site: Site, resources: ResourceSection, report: Callable[[dict[str, Any]], None]) -> None:
    ensure_contributions(
        site.cohort,
        site.split,
        site.store.path("anchors", stage.anchors),
        site.store.path("model", stage.judge),
        stage.section,
        site.store,
        scorers=0 if resources.scorers == 1 else resources.scorers,
        cpus=resources.cpus_per_run,
        gpus=resources.gpus_per_run,
        threads=resources.threads,
        report=report,
    )


def describe(error: BaseException) -> str:
    """The message for users; for a bug also where it happened."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    if isinstance(cause, DecoError):
        return str(cause)
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(cause).__name__}: {cause}{place}"


class StageSearcher(Searcher):
    """Suggests the next stage whose needs exist; Tune asks again whenever a trial ends."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.stage_of: dict[str, str] = {}

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        stage = self.progress.ready()
        if stage is not None:
            self.stage_of[trial_id] = stage.digest
            return {"stage": stage.digest}
        return None if self.progress.running else Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        if not error:  # else the announcer, who is told next and knows the trial, decides
            self.progress.finish(self.stage_of[trial_id], (result or {}).get("failure"))

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: artefacts on disk are the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class Announcer(tune.Callback):
    """Passes Tune's events on to the listeners, as stages; and puts back what Tune gives up too early."""

    def __init__(self, stages: Mapping[str, Stage], progress: Progress, listeners: list[Listener]) -> None:
        self.stages, self.progress, self.listeners = stages, progress, listeners

    def __reduce__(self) -> tuple:
        """Tune pickles its callbacks for a restore we never ask for; listeners hold threads and files."""
        return Announcer, ({}, Progress({}), [])

    def _tell(self, event: str, trial: Any, *details: Any) -> None:
        stage = self.stages[trial.config["stage"]]
        for listener in self.listeners:
            getattr(listener, event)(stage, *details)

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._tell("started", trial)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        for row in result.get("rows", []):
            self._tell("advanced", trial, {"pid": result["pid"], **row})

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        if "failure" in result:
            self._tell("failed", trial, result["failure"])
        else:
            self._tell("finished", trial, float(result.get("time_total_s", 0.0)))

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        digest = trial.config["stage"]
        # Tune restarts what runs, not a trial whose process died while it was being handed over from the last one
        if trial.should_recover() and self.progress.deaths[digest] < max(trial.max_failures, 0):
            self.progress.put_back(digest)
            return
        why = "its process died too often; see the Ray logs of its node"
        self.progress.finish(digest, why)
        self._tell("failed", trial, why)
