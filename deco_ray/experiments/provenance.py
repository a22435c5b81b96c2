"""Where results come from, for the end of every report."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import deco_ray
from deco_ray.config import Config
from deco_ray.experiments.methods import Run
from deco_ray.experiments.outcome import model_folder
from deco_ray.experiments.site import Site
from deco_ray.results.redact import redact, redact_tree
from deco_ray.results.run_files import read_metrics
from deco_ray.results.tracking import git_commit

LIBRARIES = ("torch", "ray", "faiss-cpu", "mlflow", "pyarrow", "numpy", "scikit-learn")


def provenance(site: Site) -> dict[str, Any]:
    return {
        "deco_ray": deco_ray.__version__,
        "git commit": git_commit(Path(deco_ray.__file__).parent) or "unknown",
        "cohort": redact(site.cohort.uri),
        "cohort checksum": site.cohort.checksum,
        "encoder": site.cohort.meta.encoder or "not stated",
        "split": f"{site.split.name} ({site.split.digest})",
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def config_yaml(config: Config) -> str:
    """What differs from the defaults first is what people want, but the whole tree is what repeats the run."""
    return yaml.safe_dump(redact_tree(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)


def resume_warnings(runs: Iterable[Run], sites: Mapping[str, Site]) -> list[str]:
    """Runs that were interrupted and went on: their numbers are the same, but a reader should know."""
    notes = []
    for run in runs:
        for name, digest in (("judge", run.judge), (run.method, run.model)):
            if digest is None:
                continue
            resumes = read_metrics(model_folder(run, sites, digest)).get("resumes", 0)
            if resumes:
                notes.append(f"{name} seed {run.seed} was interrupted and resumed {resumes} time(s)")
    return notes
