"""Finding trained models: folders on disk, MLflow's, or those of a finished pipeline, sweep or comparison."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from deco_ray.artefacts import RECORD, ArtefactStore
from deco_ray.cohort.store import local_path
from deco_ray.config import CounterfactualSection, MaskingSection
from deco_ray.errors import DecoError, ModelError
from deco_ray.models.saved import FACTS
from deco_ray.results.redact import redact
from deco_ray.results.tracking import probe, tracking_uri

RESULTS = "results.parquet"
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
JUDGE = "judge"  # the method under which results list judges


@dataclass(frozen=True)
class TrainedRun:
    """One (method, setting, seed) of a report."""

    name: str  # method, and the setting where there is one
    seed: int
    store: ArtefactStore
    digest: str

    @property
    def folder(self) -> Path:
        return self.store.path("model", self.digest)


@dataclass(frozen=True)
class Evidence:
    """What a DeCo run's masking ratios came from."""

    judge: Path
    anchors: Path
    counterfactual: CounterfactualSection
    masking: MaskingSection


def report_folder(path: str | Path) -> Path:
    """The folder of a report: given itself, by its report.html, or by the storage it lies in (then the newest)."""
    given = local_path(path, "the run")
    folder = given.parent if given.is_file() else given
    if (folder / RESULTS).is_file():
        return folder
    found = [
        file.parent for depth in ("report", "*/report") for file in folder.glob(f"{depth}/[!.]*/{RESULTS}")
    ]  # of a cohort's root, or of the whole storage
    if not found:
        raise ModelError(f"no finished run at {path}; give a report.html, its folder, or the storage of a pipeline")
    pipelines = [report for report in found if _kind(report) == "pipeline"]
    return max(pipelines or found, key=lambda report: (report / RESULTS).stat().st_mtime)


def _kind(report: Path) -> str | None:
    try:
        return json.loads((report / RECORD).read_text())["inputs"]["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def trained_runs(report: Path, method: str | None = None) -> list[TrainedRun]:
    """All seeds of the report's one method besides the judge, or of the one that is named."""
    columns = ["method", "setting", "seed", "model"]
    try:
        rows = pd.read_parquet(report / RESULTS, columns=columns).drop_duplicates()
    except (OSError, ValueError) as error:
        raise ModelError(f"{report / RESULTS} cannot be read: {error}") from error
    store = ArtefactStore(report.parent.parent)
    runs = [TrainedRun(f"{m} {s}".strip(), int(seed), store, digest) for m, s, seed, digest in rows.to_numpy()]
    names = list(dict.fromkeys(run.name for run in runs))
    wanted = [name for name in names if name == method] if method else [name for name in names if name != JUDGE]
    if len(wanted) != 1:
        raise ModelError(
            f"{report} holds {', '.join(names) or 'no runs'}; choose one with --method, for example "
            f"--method {(names or ['deco'])[-1]!r}"
        )
    chosen = [run for run in runs if run.name == wanted[0]]
    gone = [run for run in chosen if not (run.folder / FACTS).is_file()]
    if gone:
        raise ModelError(
            f"the model of {gone[0].name} seed {gone[0].seed} is no longer at {gone[0].folder}; run it again"
        )
    return chosen


def evidence(run: TrainedRun) -> Evidence:
    """Judge, anchors and settings behind a DeCo run, from the records of its artefacts."""
    deco = run.store.record("model", run.digest)["inputs"].get("deco")
    if not deco:
        raise ModelError(f"{run.name} seed {run.seed} is no DeCo run: it has neither judge nor anchors; give both")
    try:
        inputs = run.store.record("contributions", deco["contributions"])["inputs"]
    except OSError as error:
        raise ModelError(f"the contributions of {run.name} seed {run.seed} are gone: {error}; run it again") from error
    judge, anchors = inputs.pop("judge"), inputs.pop("anchors")
    return Evidence(
        run.store.path("model", judge),
        run.store.path("anchors", anchors),
        CounterfactualSection(**inputs),
        MaskingSection(**deco["masking"]),
    )


def fetch(uri: str, storage: Path, target: Path) -> Path:
    """An MLflow model's files below `target`; the folder with model.json and model.pt. Nothing is unpickled.

    Asked is MLFLOW_TRACKING_URI, or the database in the storage folder. It is named through the environment, because
    MLflow forgets a store given as an argument when it looks up the model of a run.
    """
    store = os.environ.get("MLFLOW_TRACKING_URI") or tracking_uri(None, storage)
    database = Path(store.removeprefix("sqlite:///"))
    if store.startswith("sqlite:///") and not database.is_file():
        raise DecoError(f"no MLflow database at {database}; give its folder with --storage or set MLFLOW_TRACKING_URI")
    if store.startswith("http"):
        try:
            probe(store)
        except ConnectionError as error:
            raise DecoError(f"MLflow at {redact(store)} does not answer: {error}") from error
    with _environment(MLFLOW_TRACKING_URI=store, **QUIET):
        import mlflow
        from mlflow.exceptions import MlflowException

        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(store)  # one set earlier in this process would win over the environment
        try:
            target.mkdir(parents=True, exist_ok=True)
            folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(target)))
        except (MlflowException, OSError, ValueError) as error:
            raise ModelError(f"MLflow has no model {uri}: {redact(str(error).splitlines()[0])}") from error
        finally:
            mlflow.set_tracking_uri(before)
    found = sorted(folder.rglob(FACTS))
    if len(found) != 1:
        raise ModelError(
            f"{uri} holds {len(found)} deco_ray models ({FACTS}); give the URI of one, runs:/<run id>/model"
        )
    return found[0].parent


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
