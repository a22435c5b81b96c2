"""Grading slides with trained models on Ray Data: one task for several slides, results in the order of the slides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from deco_ray.artefacts import temporary_beside, write_atomically
from deco_ray.cohort.splits import frequency_groups
from deco_ray.errors import DecoError, ModelError
from deco_ray.progress import bar
from deco_ray.results.ensemble import Ensemble
from deco_ray.results.metrics import evaluate
from deco_ray.results.ungraded import Slides

TASK_BYTES = 64 * 2**20  # of features in one task: enough for its start not to count
LEAST_TASKS = 8  # so that a few slides still keep a few workers busy
ANSWER = pa.schema([("slide_id", pa.string()), ("probabilities", pa.list_(pa.float64())), ("error", pa.string())])
ENDINGS = (".csv", ".parquet")


@dataclass(frozen=True)
class Graded:
    """Probabilities [n, M, C] of n slides from M models, and why the others have none."""

    slide_ids: list[str]
    probabilities: np.ndarray
    rejected: dict[str, str] = field(default_factory=dict)


def predict(ensemble: Ensemble, slides: Slides, *, on_error: str = "stop", label: str = "predict") -> Graded:
    """Every slide graded by every model; a bad slide stops the work or, with on_error="skip", is listed.

    Ray must be initialised. The models travel with the tasks, so that no worker needs their folders.
    """
    from deco_ray.cohort.stream import run_blocks  # Ray is loaded by those who use it

    rejected = dict(slides.rejected)
    if rejected and on_error == "stop":
        raise DecoError("; ".join(f"slide {slide}: {why}" for slide, why in rejected.items()))

    def work(batch: pa.Table) -> pa.Table:
        torch.set_num_threads(1)  # a task asks for one CPU
        return grade(ensemble, slides, batch["slide_id"].to_pylist())

    sizes = slides.sizes()
    tables = (pa.table({"slide_id": share}) for share in shares(sizes))
    done: list[str] = []
    found: list[list[float]] = []
    with bar(len(sizes), label, "slide") as shown:
        for table in run_blocks(tables, work):
            for slide, values, error in zip(*(table[name].to_pylist() for name in ANSWER.names)):
                if error and on_error == "stop":
                    raise DecoError(f"{error} (--on-error skip lists such slides and grades the rest)")
                if error:
                    rejected[slide] = error
                else:
                    done.append(slide)
                    found.append(values)
                shown.update()
    if not done:
        some = "; ".join(list(rejected.values())[:3]) or "there are none"
        raise DecoError(f"no slide of {slides.where} could be graded: {some}")
    shape = (len(done), len(ensemble.members), len(ensemble.classes))
    return Graded(done, np.asarray(found, dtype=np.float64).reshape(shape), rejected)


def grade(ensemble: Ensemble, slides: Slides, slide_ids: Sequence[str]) -> pa.Table:
    """The slides one after another in this process: a row each, with probabilities (M · C) or an error."""
    answers: list[list[float]] = []
    errors: list[str] = []
    for slide in slide_ids:
        try:
            values = ensemble.probabilities(slides.features(slide))
            if not np.isfinite(values).all():
                raise ModelError(f"slide {slide}: the prediction is not finite; its features hold NaN or Inf")
            answers.append(values.ravel().tolist())
            errors.append("")
        except DecoError as error:
            answers.append([])
            errors.append(str(error) if slide in str(error) else f"slide {slide}: {error}")
    return pa.table([list(slide_ids), answers, errors], schema=ANSWER)


def shares(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Consecutive slides of about TASK_BYTES together; depends on the data only."""
    limit = min(TASK_BYTES, sum(sizes.values()) / LEAST_TASKS)
    share: list[str] = []
    total = 0
    for slide, size in sizes.items():
        if share and total + size > limit:
            yield share
            share, total = [], 0
        share.append(slide)
        total += size
    if share:
        yield share


def prediction_frame(graded: Graded, classes: Sequence[str], truth: dict[str, int]) -> pd.DataFrame:
    """slide_id, [label,] predicted, p_<class> (mean over models), and with several models std_<class>, agreement.

    `agreement` is the share of models whose own first choice is the predicted class.
    """
    mean = graded.probabilities.mean(1)  # [n, C]
    choice = mean.argmax(1)
    columns: dict[str, Any] = {"slide_id": graded.slide_ids}
    if any(slide in truth for slide in graded.slide_ids):
        columns["label"] = [classes[truth[slide]] if slide in truth else None for slide in graded.slide_ids]
    columns["predicted"] = [classes[index] for index in choice]
    columns |= {f"p_{name}": mean[:, index] for index, name in enumerate(classes)}
    if graded.probabilities.shape[1] > 1:
        spread = graded.probabilities.std(1, ddof=1)
        columns |= {f"std_{name}": spread[:, index] for index, name in enumerate(classes)}
        columns["agreement"] = (graded.probabilities.argmax(2) == choice[:, None]).mean(1)
    return pd.DataFrame(columns)


def scores(graded: Graded, ensemble: Ensemble, truth: dict[str, int]) -> dict[str, Any] | None:
    """Metrics of the mean over models on the slides whose label is known; none without any."""
    known = [row for row, slide in enumerate(graded.slide_ids) if slide in truth]
    if not known:
        return None
    counts = ensemble.members[0].facts.get("train_counts")
    labels = [truth[graded.slide_ids[row]] for row in known]
    return evaluate(labels, graded.probabilities[known].mean(1), frequency_groups(counts) if counts else {})


def check_output(path: str | Path) -> Path:
    """The file to write, before hours of work are spent on it; whatever is there stays until it is written."""
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise DecoError(f"--out {path} must end in .csv or .parquet")
    for file in (path, rejected_path(path)):
        if file.is_dir():
            raise DecoError(f"--out {path} would write to {file}, which is a folder; give another name")
    probe = temporary_beside(rejected_path(path))  # the longest name to be written
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(bytes(4096))  # a full disk still takes empty files
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise DecoError(f"cannot write to {path.parent}: {error.strerror}; choose another --out") from error
    return path


def rejected_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.rejected.csv")


def write_predictions(out: Path, frame: pd.DataFrame, rejected: dict[str, str]) -> None:
    """The frame as CSV or Parquet, and <out>.rejected.csv only if slides were left out; each appears when complete."""
    if rejected:
        left = pd.DataFrame({"slide_id": list(rejected), "reason": list(rejected.values())})
        write_atomically(rejected_path(out), left.to_csv(index=False))
    if out.suffix.lower() == ".csv":
        write_atomically(out, frame.to_csv(index=False))
    else:
        sink = pa.BufferOutputStream()
        frame.to_parquet(sink, index=False)
        write_atomically(out, sink.getvalue().to_pybytes())
    if not rejected:
        rejected_path(out).unlink(missing_ok=True)  # that of the predictions just replaced: it would mislead
