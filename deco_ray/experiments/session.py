"""Where a job runs: its base directory, its Ray, and whether the cluster can hold one run at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import ray

from deco_ray.cluster import start_ray
from deco_ray.cohort.store import local_path
from deco_ray.config import Config, ResourceSection
from deco_ray.errors import ConfigError, DecoError
from deco_ray.results.redact import redact

HOME = "DECO_RAY_HOME"  # the directory relative paths mean, when the job runs from an uploaded copy
UPLOAD_MARK = "/runtime_resources/working_dir_files/"


def base_directory() -> Path:
    """The submitting directory: DECO_RAY_HOME where it is set, else the current directory."""
    return Path(os.environ.get(HOME) or os.getcwd()).absolute()


def resolve(path: str, key: str) -> str:
    """An absolute path or a URI; workers change their directory, so nothing relative may reach them."""
    if "://" in path or os.path.isabs(path):
        return path
    base = base_directory()
    if UPLOAD_MARK in f"{base}/" and HOME not in os.environ:
        raise ConfigError(
            f"{key} = {path!r} is relative, but this job runs from an uploaded copy of the working directory, "
            f"which Ray removes afterwards. Give an absolute path, or submit with "
            f'--runtime-env-json \'{{"env_vars": {{"{HOME}": "\'$PWD\'"}}}}\''
        )
    return str(base / path)


def absolute(config: Config) -> Config:
    """The configuration with every path absolute."""
    update: dict[str, Any] = {"cohort": resolve(config.cohort, "cohort"), "storage": resolve(config.storage, "storage")}
    if config.report.instances is not None:
        instances = resolve(config.report.instances, "report.instances")
        if not os.path.isfile(instances):  # only the report reads it: too late to be told there
            raise ConfigError(
                f"report.instances = {redact(instances)!r} is no file; give the .npz with the class of every patch"
            )
        update["report"] = config.report.model_copy(update={"instances": instances})
    return config.model_copy(update=update)


def check_storage(storage: str) -> Path:
    """The storage folder, writable, or a message that says what to do."""
    path = local_path(storage, "storage")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{os.getpid()}"
        try:
            probe.write_bytes(bytes(4096))  # a full disk still takes empty files
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise DecoError(
            f"cannot write to the storage folder {path}: {error.strerror}; set `storage` to another"
        ) from error
    return path


def connect(resources: ResourceSection) -> None:
    """Join the cluster of the job, or start a local Ray; refuse when not even one run fits."""
    start_ray()
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    check_capacity(resources, ray.nodes())


def check_capacity(resources: ResourceSection, nodes: list[dict]) -> None:
    """One run must fit on one node: Tune would otherwise wait for ever."""
    alive = [node["Resources"] for node in nodes if node.get("Alive")]
    for name, wanted in (("CPU", resources.cpus_per_run), ("GPU", resources.gpus_per_run)):
        most = max((node.get(name, 0.0) for node in alive), default=0.0)
        if wanted > most:
            key = f"resources.{name.lower()}s_per_run"
            raise DecoError(
                f"one run needs {wanted:g} {name} ({key}), but the largest node of this cluster has {most:g}; "
                f"lower it with --set {key}={most:g} or add a node"
            )


def concurrent_runs(resources: ResourceSection, nodes: list[dict]) -> int:
    """How many runs the cluster holds side by side; each worker of a data-parallel run counts."""
    total = 0
    for node in nodes:
        if not node.get("Alive"):
            continue
        fits = node["Resources"].get("CPU", 0.0) / resources.cpus_per_run
        if resources.gpus_per_run:
            fits = min(fits, node["Resources"].get("GPU", 0.0) / resources.gpus_per_run)
        total += int(fits + 1e-9)
    total = max(1, total // resources.workers_per_run)
    return min(total, resources.max_concurrent or total)
