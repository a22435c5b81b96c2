"""One MLflow run: curves that never double, parameters written once, artefacts, and a mark when all of it is there."""

from __future__ import annotations

import itertools
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from deco_ray.errors import DecoError
from deco_ray.results.redact import redact, redact_tree
from deco_ray.results.tracking_lookup import LOGGED, Found

if TYPE_CHECKING:
    import pandas as pd

    from deco_ray.results.tracking import Tracker

log = logging.getLogger(__name__)

# MLflow's limits of one request and one value
METRICS_PER_BATCH, PARAMS_PER_BATCH, PARAM_LENGTH, TAG_LENGTH = 1000, 100, 6000, 8000
CURVES = "epochs/"  # one section of charts, which sorts before those of single values (test/, val/)
EPOCH = "epoch"  # logged with every row of a curve: its last value tells where a resumed curve goes on


class RunHandle:
    """A parent or child run. A run whose results are all logged (`complete`) takes no more calls and costs none."""

    def __init__(
        self,
        tracker: Tracker,
        run_id: str | None,
        name: str,
        digest: str,
        tags: dict[str, str],
        children: dict[str, Found | RunHandle],
        fresh: bool,
    ) -> None:
        self.tracker, self.run_id, self.name, self.digest = tracker, run_id, name, digest
        self.tags = tags
        self._params: dict[str, str] = {}
        self._metrics: dict[str, float] = {}
        self.children = children
        self._opened = fresh  # what MLflow has of an older run is read before the first write
        self._monitor: Any = None

    @property
    def complete(self) -> bool:
        """Whether everything about this digest is in MLflow already."""
        return self.tags.get(LOGGED) == self.digest

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Flat parameters, credentials struck out; one that MLflow has is left alone, for it cannot be changed."""
        flat = {_key(name): str(value)[:PARAM_LENGTH] for name, value in flatten(redact_tree(params), ".").items()}

        def write(client: Any) -> None:
            from mlflow.entities import Param

            new = {name: value for name, value in flat.items() if name not in self._params}
            for part in _chunks([Param(*item) for item in new.items()], PARAMS_PER_BATCH):
                client.log_batch(self.run_id, params=part)
            self._params.update(new)

        if flat:
            self.write(write)

    def log_epochs(self, rows: Sequence[Mapping[str, Any]] | pd.DataFrame, step_key: str = EPOCH) -> None:
        """Epoch curves, as `epochs/<name>`; only rows that follow what MLflow has: a resume doubles and skips no point.

        Epochs count from 0. After a gap (a killed driver took reports with it) nothing is written: the finished
        run's history holds every epoch and closes it.
        """
        records: Any = rows if isinstance(rows, Sequence) else rows.to_dict("records")

        def write(client: Any) -> None:
            last = int(self._metrics.get(EPOCH, -1))
            history: dict[int, dict[str, Any]] = {}
            for row in sorted(records, key=lambda row: row[step_key]):
                step = int(row[step_key])
                history[step] = {_key(f"{CURVES}{name}"): value for name, value in row.items() if name != step_key}
                history[step][EPOCH] = step
            # a column that live reports left out, so that a run shows the same curves however it was logged
            for name in {name for row in history.values() for name in row} - set(self._metrics):
                old = [_metrics({name: row.get(name)}, step) for step, row in history.items() if step <= last]
                self._log(client, old)
            new = itertools.takewhile(history.__contains__, itertools.count(last + 1))
            self._log(client, [_metrics(history[step], step) for step in new])

        if records:
            self._append(write)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Final values, nested ones joined by `/`; non-finite ones are left out, known ones not repeated."""

        def write(client: Any) -> None:
            made = _metrics(flatten(metrics, "/"), 0)
            new = [metric for metric in made if self._metrics.get(metric.key) != metric.value]
            self._log(client, ([metric] for metric in new))

        self._append(write)

    def log_figure(self, figure: Any, name: str) -> None:
        """A matplotlib figure, or the path of a picture, as figures/<name>."""
        if isinstance(figure, str | Path):
            self._upload(
                name if Path(name).suffix else f"{name}{Path(figure).suffix}", "figures", Path(figure).read_bytes
            )
            return
        from deco_ray.results.canvas import png_bytes

        self._upload(name if name.endswith(".png") else f"{name}.png", "figures", lambda: png_bytes(figure))

    def log_file(self, path: str | Path, artifact_path: str | None = None) -> None:
        """A file as it is, below `artifact_path`."""
        self.write(lambda client: client.log_artifact(self.run_id, str(path), artifact_path))

    def log_table(self, table: pd.DataFrame, name: str) -> None:
        """A table as tables/<name>.csv, which MLflow's pages show as a table; logged again it replaces the old one."""
        self._upload(f"{name}.csv", "tables", lambda: table.to_csv(index=False).encode())

    def log_config(self, tree: Mapping[str, Any], name: str = "config.yaml") -> None:
        """The whole nested configuration as one YAML file, credentials struck out."""
        text = yaml.safe_dump(redact_tree(tree), sort_keys=False, allow_unicode=True)
        self._upload(name, None, text.encode)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        texts = {_key(name): redact(str(value))[:TAG_LENGTH] for name, value in tags.items() if value is not None}
        new = {name: value for name, value in texts.items() if self.tags.get(name) != value}

        def write(client: Any) -> None:
            from mlflow.entities import RunTag

            client.log_batch(self.run_id, tags=[RunTag(*item) for item in new.items()])
            self.tags.update(new)

        if new:
            self.write(write)

    def describe(self, markdown: str) -> None:
        """The text at the top of the run's page: what it is, where the report lies."""
        self.set_tags({"mlflow.note.content": markdown})

    def log_run_artefact(
        self, folder: str | Path, params: Mapping[str, Any] | None = None, tags: Mapping[str, Any] | None = None
    ) -> None:
        """Everything about a finished training run from its artefact folder, then the mark that it is all there."""
        if self.complete:
            return
        from deco_ray.results.tracking_artefact import log_run

        try:
            log_run(self, Path(folder), params or {}, tags or {})
        except (
            DecoError,
            OSError,
            ValueError,
            KeyError,
        ) as error:  # a damaged artefact is the next stage's to refuse, not ours
            log.warning("%s is not logged to MLflow: %s in %s: %s", self.name, type(error).__name__, folder, error)

    def finish(self, status: str = "FINISHED") -> None:
        """End the run: FINISHED marks it complete; FAILED or KILLED leave it open to the next attempt."""
        if self._monitor is not None:
            self._monitor.finish()
            self._monitor = None

        def write(client: Any) -> None:
            client.set_terminated(self.run_id, status)
            if status == "FINISHED":
                # last of all: a failure on the way leaves no mark, and everything is tried again
                client.set_tag(self.run_id, LOGGED, self.digest)
                self.tags[LOGGED] = self.digest

        self.write(write)

    def watch_system(self, uri: str) -> None:
        """Sample this host's CPU, memory and GPU into the run until it ends."""

        def write(client: Any) -> None:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=uri)
            self._monitor.start()

        self.write(write)

    def _log(self, client: Any, rows: Iterable[list[Any]]) -> None:
        """Rows of metrics in as few batches as MLflow allows, a row never divided between two."""
        batches: list[list[Any]] = [[]]
        for row in rows:
            if len(batches[-1]) + len(row) > METRICS_PER_BATCH:
                batches.append([])
            batches[-1] += row
        for batch in filter(None, batches):
            client.log_batch(self.run_id, metrics=batch)
            self._metrics.update({metric.key: metric.value for metric in batch})

    def _append(self, action: Callable[[Any], None]) -> None:
        """Like `write`, alone and knowing what MLflow has by now: another driver may have resumed the same run."""

        def run(client: Any) -> None:
            with self.tracker.alone():
                self._metrics = self.tracker.known_metrics(str(self.run_id))
                action(client)

        self.write(run)

    def _upload(self, name: str, folder: str | None, content: Callable[[], bytes]) -> None:
        def write(client: Any) -> None:
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch) / name
                path.write_bytes(content())
                client.log_artifact(self.run_id, str(path), folder)

        self.write(write)

    def write(self, action: Callable[[Any], None]) -> None:
        """Run an action unless the run is complete; a run of an earlier attempt is read and reopened first."""
        if self.run_id is None or self.complete:
            return

        def run(client: Any) -> None:
            if not self._opened:
                known = client.get_run(self.run_id)
                self._params = dict(known.data.params)
                if known.info.status != "RUNNING":
                    client.update_run(self.run_id, status="RUNNING")
                self._opened = True
            action(client)

        self.tracker.call(run)


def flatten(tree: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, names joined by the separator."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, separator, f"{prefix}{name}{separator}")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _metrics(values: Mapping[str, Any], step: int) -> list[Any]:
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    finite = {_key(name): float(value) for name, value in values.items() if _is_finite(value)}
    return [Metric(name, value, now, step) for name, value in finite.items()]


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:  # None, texts and lists are no metrics
        return False


def _key(name: str) -> str:
    """MLflow allows letters, digits and _-. :/ in names; class names may hold anything."""
    return re.sub(r"[^\w\-. :/]", "_", str(name))[:250]


def _chunks(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
