"""MLflow as a projection of what is on disk: only the driver logs, twice is as good as once, down is no disaster.

experiment = cohort; parent run = one pipeline, sweep, comparison or plan; child = one (method, setting, seed).
A run carries the digest of what it holds, so that a resumed or repeated command continues the run it began. Any
failure of the store switches tracking off for the rest of the command, with one warning: the results are on disk,
and the next run of the same command logs what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import logging
import os
import sqlite3
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deco_ray
from deco_ray.artefacts import write_atomically
from deco_ray.cohort.store import Cohort
from deco_ray.config import TrackingSection
from deco_ray.errors import ConfigError
from deco_ray.results.redact import redact
from deco_ray.results.tracking_lock import locked
from deco_ray.results.tracking_lookup import (
    DIGEST,
    KIND,
    PARENT,
    Found,
    known_metrics_sqlite,
    look_up,
    look_up_sqlite,
    oldest,
)
from deco_ray.results.tracking_run import RunHandle

log = logging.getLogger(__name__)

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # opens on runs, not on chats
PROBE_TIMEOUT_S = 3.0
# a server that is up answers in well under a second; MLflow's own patience is minutes, and training would wait
HTTP_PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
}


class Tracker:
    """Where runs are logged; every call returns at once when tracking is disabled or has failed."""

    def __init__(self, section: TrackingSection, storage: Path, cohort: Cohort) -> None:
        self.section, self.storage, self.cohort = section, Path(storage).absolute(), cohort
        self.uri = tracking_uri(section.uri, self.storage)
        path = self.uri.removeprefix("sqlite:///")
        self.database = Path(path) if path != self.uri else None
        place = self.database or self.storage / "mlflow"
        self.lock = place.with_name(f".{place.name}.lock")
        self.experiment = section.experiment or cohort.name
        self.experiment_id = ""
        self.off = not section.enabled
        self._client: Any = None
        self._connecting = threading.Lock()

    @classmethod
    def open(cls, section: TrackingSection, storage: Path, cohort: Cohort) -> Tracker:
        """A tracker that connects when it first has something to write."""
        return cls(section, storage, cohort)

    def warm_up(self) -> None:
        """Connect in the background: importing MLflow and creating its tables overlap with the start of Ray."""
        if not self.off:
            threading.Thread(target=self.call, args=(lambda client: None,), name="mlflow", daemon=True).start()

    def parent(
        self,
        name: str,
        kind: str,
        digest: str,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> RunHandle:
        """The run of one pipeline, sweep, comparison or plan: found by kind and digest, or new."""

        def find() -> RunHandle:
            with self.alone():
                return self._handle(self._look_up(kind, digest), name, digest, {KIND: kind}, params, tags)

        handle = self._attempt(find) or self._untracked(name, digest)
        if self.section.system_metrics:
            handle.watch_system(self.uri)
        return handle

    def child(
        self,
        parent: RunHandle,
        name: str,
        digest: str,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> RunHandle:
        """The run of one (method or stage, setting, seed) below its parent: found by digest, or new."""
        known = parent.children.get(digest)
        if isinstance(known, RunHandle):  # of this command, with all it knows
            return known

        def find() -> RunHandle:
            with self.alone():
                found = known or self._look_up_child(parent, digest)  # another driver of this command may have made it
                return self._handle(found, name, digest, {KIND: "run", PARENT: parent.run_id or ""}, params, tags)

        handle = self._attempt(find) or self._untracked(name, digest)
        if handle.run_id:
            parent.children[digest] = handle
        return handle

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """One driver at a time looks what the store has and adds what is missing, of those that share its storage."""
        return locked(self.lock)

    def known_metrics(self, run_id: str) -> dict[str, float]:
        """The last value of every metric that the store has of a run by now."""
        if self.database is not None:
            return known_metrics_sqlite(self.database, run_id)
        return dict(self._connect().get_run(run_id).data.metrics)

    def call(self, action: Callable[[Any], Any]) -> Any:
        """Run an action on the client; the first failure of any kind ends tracking for this command, not training."""
        return self._attempt(lambda: action(self._connect()))

    def _attempt(self, action: Callable[[], Any]) -> Any:
        if self.off:
            return None
        try:
            return action()
        except Exception as error:  # whatever the store, its driver or its server raises must not cost a training
            if self.off:  # the background connection failed meanwhile, and said so
                return None
            self.off = True
            reason = redact(f"{type(error).__name__}: {error}".strip().split("\n")[0])[:300]
            log.warning(
                "tracking is off for the rest of this command: MLflow at %s failed (%s). Results are on disk; "
                "run the same command again when it is back, and what is missing is logged.",
                redact(self.uri),
                reason,
            )
            return None

    def _untracked(self, name: str, digest: str) -> RunHandle:
        return RunHandle(self, None, name, digest, {}, {}, fresh=True)

    def _handle(self, found: Found | None, name: str, digest: str, own: dict[str, str], params, tags) -> RunHandle:
        if found is not None:
            handle = RunHandle(self, found.run_id, name, digest, found.tags, {**found.children}, fresh=False)
        else:
            run_tags = {**self._provenance(), **own, DIGEST: digest}
            run_id = self.call(lambda client: self._create(client, name, run_tags))
            handle = RunHandle(self, run_id, name, digest, run_tags, {}, fresh=True)
        if not handle.complete:
            handle.log_params(params or {})
            handle.set_tags(tags or {})
        return handle

    def _look_up(self, kind: str, digest: str) -> Found | None:
        if self.off:
            return None
        if self.database is not None:
            try:
                return look_up_sqlite(self.database, self.experiment, kind, digest)
            except sqlite3.Error as error:
                log.debug("reading %s directly failed (%s); asking MLflow", self.uri, error)
        return self.call(lambda client: look_up(client, self.experiment_id, kind, digest))

    def _look_up_child(self, parent: RunHandle, digest: str) -> Found | None:
        if self.database is not None:
            now = self._look_up(parent.tags.get(KIND, ""), parent.digest)
            return now.children.get(digest) if now else None
        return self.call(lambda client: oldest(client, self.experiment_id, {DIGEST: digest, PARENT: parent.run_id}))

    def _create(self, client: Any, name: str, tags: dict[str, str]) -> str:
        from mlflow.entities import Dataset, DatasetInput
        from mlflow.exceptions import MlflowException

        run_id = client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id
        source = json.dumps({"uri": redact(self.cohort.uri)})
        dataset = Dataset(self.cohort.name, self.cohort.checksum[:36] or "none", "cohort", source)
        inputs = [DatasetInput(dataset, [])]
        try:
            client.log_inputs(run_id, inputs)
        except MlflowException:  # another driver added the same dataset meanwhile: now it is found, not added
            client.log_inputs(run_id, inputs)
        return run_id

    def _provenance(self) -> dict[str, str]:
        tags = {
            "deco.dataset": self.cohort.name,
            "deco.dataset_checksum": self.cohort.checksum,
            "deco.version": deco_ray.__version__,
            "mlflow.source.name": "deco-ray",
            "mlflow.user": _user(),
        }
        commit = git_commit(Path(deco_ray.__file__).parent)
        return {**tags, "mlflow.source.git.commit": commit} if commit else tags

    def _connect(self) -> Any:
        """The client, its store and the experiment, created once; later calls cost nothing."""
        with self._connecting:
            if self.off:
                raise ConnectionError("the first attempt failed")
            if self._client is None:
                os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
                if self.uri.startswith(("http://", "https://")):
                    for name, value in HTTP_PATIENCE.items():
                        os.environ.setdefault(name, value)
                    probe(self.uri)
                from mlflow import MlflowClient

                for name in ("mlflow", "alembic"):  # announcing every table and every validation is not news
                    logging.getLogger(name).setLevel(logging.WARNING)
                if self.database is not None and not self.database.exists():
                    create_database(self.database)
                client = MlflowClient(tracking_uri=self.uri)
                self.experiment_id = self._ensure_experiment(client)
                self._client = client
            return self._client

    def _ensure_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            # frozen into the experiment when it is made: absolute, because nobody else shares our directory;
            # a server decides for itself
            location = None if self.uri.startswith("http") else (self.storage / ARTIFACTS).as_uri()
            try:
                return client.create_experiment(self.experiment, artifact_location=location, tags=EXPERIMENT_TAGS)
            except MlflowException:  # another driver was first
                experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None or experiment.lifecycle_stage != "active":
            raise RuntimeError(
                f"experiment {self.experiment!r} was deleted; restore it in MLflow or set tracking.experiment"
            )
        return experiment.experiment_id


def tracking_uri(uri: str | None, storage: Path) -> str:
    """The store's absolute URI: a SQLite file in the storage folder unless the configuration names another."""
    if uri is None:
        return f"sqlite:///{storage / DATABASE}"
    scheme, separator, rest = uri.partition("://")
    relative = scheme == "sqlite" and not rest.startswith("//")  # of which of the many working directories?
    if not separator or scheme == "file" or relative:
        raise ConfigError(
            f"tracking.uri = {redact(uri)!r} is neither a server (http://host:5000) nor a database "
            "with an absolute path (sqlite:////folder/mlflow.db); leave it out for a SQLite file in the storage folder"
        )
    return uri.rstrip("/")


def create_database(database: Path) -> None:
    """MLflow's tables, all or nothing: made elsewhere and linked into place, so that a kill leaves no half a store.

    Made in memory where the machine allows: MLflow goes through some fifty migrations, each flushed to disk.
    """
    from mlflow import MlflowClient

    database.parent.mkdir(parents=True, exist_ok=True)
    complete = database.with_name(f".{database.name}.{uuid.uuid4().hex[:8]}.tmp")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        with tempfile.TemporaryDirectory(dir=memory) as scratch:
            made = Path(scratch) / database.name
            MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments(max_results=1)
            write_atomically(complete, made.read_bytes())
        try:
            os.link(complete, database)
        except FileExistsError:
            pass  # another driver was first, and may have runs in it
        except OSError:  # a file system without hard links
            if not database.exists():
                os.replace(complete, database)
    finally:
        complete.unlink(missing_ok=True)


def probe(uri: str) -> None:
    """Fail within seconds if nobody listens; any answer at all counts as up."""
    import requests

    started = time.monotonic()
    try:
        requests.get(f"{uri}/health", timeout=PROBE_TIMEOUT_S)
    except requests.RequestException as error:
        raise ConnectionError(f"no answer within {time.monotonic() - started:.1f} s: {error}") from None


@functools.cache
def git_commit(folder: Path) -> str | None:
    """The commit of the checkout this code runs from; None when it was installed or uploaded without one."""
    try:
        # tracked: a package installed below somebody else's checkout is not part of that repository
        ask = ["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"]
        subprocess.run(ask, capture_output=True, timeout=5, check=True)
        ask = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        return subprocess.run(ask, capture_output=True, timeout=5, check=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # containers run under ids without a name
        return "unknown"
