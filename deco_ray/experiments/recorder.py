"""Tells the tracker what the stages do, from a thread of its own: logging never holds up a training.

A child run per stage and seed. Epochs are logged as they come, several in one batch when the store is slow;
the finished artefact is logged whole from disk. What could not be logged is logged by the next run of the command.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from deco_ray.experiments.site import Site
from deco_ray.experiments.stages import Stage, StageGraph, TrainStage
from deco_ray.results.tracking import Tracker
from deco_ray.results.tracking_run import RunHandle

log = logging.getLogger(__name__)


class Recorder:
    def __init__(self, tracker: Tracker, parent: RunHandle, sites: Mapping[str, Site]) -> None:
        self.tracker, self.parent, self.sites = tracker, parent, sites
        self.waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self.epochs: dict[str, list[dict[str, Any]]] = {}  # reports not yet written, by stage
        self.thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (task := self.waiting.get()) is not None:
            try:
                task()
            except Exception as error:  # tracking must never cost a training
                log.warning("could not log to MLflow: %s; the next run of the same command tries again", error)

    def _child(self, stage: TrainStage) -> RunHandle:
        params = {
            "stage": stage.spec.stage,
            "seed": stage.spec.seed,
            "model": stage.spec.model.name,
            **{f"training.{key}": value for key, value in stage.spec.training.model_dump(mode="json").items()},
            **(flat_deco(stage) if stage.spec.deco else {}),
        }
        return self.tracker.child(self.parent, stage.title, stage.digest, params, {"deco.stage": stage.spec.stage})

    def started(self, stage: Stage) -> None:
        """Nothing to write before the first epoch."""

    def advanced(self, stage: Stage, metrics: dict[str, Any]) -> None:
        if isinstance(stage, TrainStage) and "epoch" in metrics:
            self.epochs.setdefault(stage.digest, []).append(epoch_metrics(metrics))
            self.waiting.put(lambda: self._write_epochs(stage))

    def _write_epochs(self, stage: TrainStage) -> None:
        rows = self.epochs.pop(stage.digest, [])  # an earlier task may have written them all
        if rows:
            self._child(stage).log_epochs(rows)

    def finished(self, stage: Stage, seconds: float) -> None:
        if isinstance(stage, TrainStage):
            self.waiting.put(lambda: self._write_artefact(stage))

    def _write_artefact(self, stage: TrainStage) -> None:
        folder = self.sites[stage.site].store.path("model", stage.digest)
        child = self._child(stage)
        child.log_run_artefact(folder)
        if not child.complete:  # it said why; the next run of the command tries again
            child.finish("FAILED")

    def failed(self, stage: Stage, why: str) -> None:
        if isinstance(stage, TrainStage):

            def write() -> None:
                child = self._child(stage)
                child.set_tags({"deco.failure": why})
                child.finish("FAILED")

            self.waiting.put(write)

    def catch_up(self, graph: StageGraph, failures: Mapping[str, str]) -> None:
        """Log every finished stage that is not logged yet: reused ones, and those of a time when tracking was down."""
        for stage in graph:
            logged = self.parent.children.get(stage.digest)
            if isinstance(stage, TrainStage) and stage.digest not in failures and not is_complete(logged):
                self.finished(stage, 0.0)

    def submit(self, task: Callable[[], None]) -> None:
        """Anything else to be logged, in its turn."""
        self.waiting.put(task)

    def close(self) -> None:
        """Wait until all is logged."""
        self.waiting.put(None)
        self.thread.join()


def is_complete(found: Any) -> bool:
    return found is not None and "deco.logged" in found.tags


def epoch_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The loop's own numbers; Tune adds bookkeeping of its own to every report."""
    return {
        key: value for key, value in metrics.items() if key == "epoch" or key.startswith(("train_", "val_", "loss"))
    }


def flat_deco(stage: TrainStage) -> dict[str, Any]:
    deco = stage.spec.deco.model_dump(mode="json") if stage.spec.deco else {}
    return {
        f"{section}.{key}": value
        for section, values in deco.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }
