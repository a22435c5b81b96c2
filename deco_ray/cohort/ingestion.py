"""Ingest: a folder of feature files and a CSV of labels become a cohort, or a list of everything that is wrong.

    discover the files -> match labels and splits -> check and write parts on Ray Data -> assemble -> rename

Parts gather in `.<name>.ingest` beside the cohort. A kill leaves them there and the next run takes them up; a
refusal removes them. The cohort appears under its own name when it is complete.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from deco_ray.artefacts import write_atomically
from deco_ray.cohort.imports import read_split, split_files
from deco_ray.cohort.labels import (
    Classes,
    Problem,
    check_files,
    match_labels,
    read_labels,
    resolve_classes,
    without_labels,
)
from deco_ray.cohort.parts import Outcome, PartPlan, Shape, first_shape, plan_parts, settled_shape, write_part
from deco_ray.cohort.schema import CohortMeta, part_name
from deco_ray.cohort.sources import Folder, discover
from deco_ray.cohort.splits import new_split, save_split
from deco_ray.cohort.store import Cohort, shown
from deco_ray.cohort.writer import slide_row, write_index
from deco_ray.errors import CohortError, DecoError
from deco_ray.progress import bar

REJECTED = "rejected.csv"
SHOWN = 100  # problems in a message; rejected.csv has all
ROOM = 1.05  # of the sources' size, for what Parquet adds


@dataclass(frozen=True)
class Written:
    plan: PartPlan
    outcomes: list[Outcome]


def ingest(
    source: str | Path,
    out: str | Path,
    labels: str | Path | None = None,
    classes: Sequence[str] | str | Path | None = None,
    normal_class: str | int | None = None,
    *,
    format: str = "auto",
    on_error: str = "stop",
    splits: Sequence[str | Path] | None = None,
    name: str | None = None,
    encoder: str | None = None,
    patch_size: int | None = None,
    magnification: float | None = None,
    unlabelled: bool = False,
) -> Cohort:
    """The cohort at `out` from the feature files below `source`.

    `labels` defaults to labels.csv in the source, `classes` to classes.yaml beside the labels, `splits` to the
    splits_*.csv of the source. A problem stops the ingest before anything is written, after all files were
    checked; with on_error="skip" the slide goes to rejected.csv instead. `unlabelled` slides can only be predicted.
    """
    if on_error not in ("stop", "skip"):
        raise CohortError(f"on_error is {on_error!r}; choose stop or skip")
    target = Path(out)
    if "://" in str(out):
        raise CohortError(f"{shown(out)}: ingest writes to a folder; copy the cohort to the object store afterwards")
    if target.exists():
        raise CohortError(f"{target} exists already; choose another folder or remove it first")
    folder = discover(source, format, encoder)
    known, given, problems = _labelled(folder, labels, classes, normal_class, unlabelled)
    assignments = {path.stem: read_split(path) for path in _split_paths(folder, splits)}
    if on_error == "stop":
        problems += _strangers(assignments, known, {problem.slide_id for problem in problems})
    files = [file for file in folder.files if file.slide_id in known]

    work = target.parent / f".{target.name}.ingest"
    try:
        # what must fail anyway is checked to the end, for one complete report, but not written
        parts = _run(folder, files, None if problems and on_error == "stop" else work)
        relative = dict(folder.names)
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        problems += [Problem(o.slide_id, relative[o.slide_id], o.reason) for o in outcomes if o.reason]
        good = {outcome.slide_id for outcome in outcomes if not outcome.reason}
        if on_error == "stop" and problems:
            _refuse(problems + _unused_classes(given, known, set(known), unlabelled), folder.root)
        empty = _unused_classes(given, known, good, unlabelled)
        if empty or not good:
            _refuse(problems + empty, folder.root)
        meta = CohortMeta(
            name=name or target.name,
            classes=given.names,
            normal_class=given.normal,
            encoder=folder.encoder,
            patch_size=patch_size,
            magnification=magnification,
            **asdict(parts[0].plan.shape),
        )
        _assemble(work, target, meta, parts, known, problems, assignments)
    except DecoError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise CohortError(f"cannot write {target}: {error}; nothing was written") from error
    shutil.rmtree(work, ignore_errors=True)
    return Cohort.open(str(target))


def _labelled(
    folder: Folder,
    labels: str | Path | None,
    classes: Sequence[str] | str | Path | None,
    normal_class: str | int | None,
    unlabelled: bool,
) -> tuple[dict[str, tuple[str, int]], Classes, list[Problem]]:
    """Case and class of each usable slide, the classes, and what is wrong with the others."""
    files = folder.names
    problems = check_files(files)
    if unlabelled:
        given = resolve_classes(classes, normal_class, [], None) if classes is not None else Classes(())
        known = without_labels(files)
    else:
        path = Path(labels) if labels is not None else folder.root / "labels.csv"
        if not path.is_file():
            raise CohortError(
                f"no labels at {path}; give a CSV case_id,slide_id,label, or unlabelled=True (--unlabelled) for a "
                "cohort to predict on"
            )
        rows = read_labels(path)
        given = resolve_classes(classes, normal_class, [row.label for row in rows], path.parent)
        known, wrong = match_labels(files, rows, given, path.name)
        problems += wrong
    refused = {problem.slide_id for problem in problems}
    return {slide: facts for slide, facts in known.items() if slide not in refused}, given, problems


def _split_paths(folder: Folder, splits: Sequence[str | Path] | None) -> list[Path]:
    paths = split_files(folder.root) if splits is None else [Path(path) for path in splits]
    repeated = [stem for stem, count in Counter(path.stem for path in paths).items() if count > 1]
    if repeated:
        raise CohortError(f"two splits are named {repeated[0]}; rename one, since the file's name becomes the split's")
    return paths


def _strangers(assignments: dict[str, dict[str, str]], known: dict, reported: set[str]) -> list[Problem]:
    """Slides of a split that have neither features nor a report of their own."""
    return [
        Problem(slide, f"{name}.csv", "in the split but not among the slides")
        for name, assignment in assignments.items()
        for slide in assignment
        if slide not in known and slide not in reported
    ]


def _unused_classes(given: Classes, known: dict, good: set[str], unlabelled: bool) -> list[Problem]:
    if unlabelled:
        return []
    used = {known[slide][1] for slide in good}
    return [
        Problem("-", f"class {name}", "no slide has this class; remove it from the classes or add slides")
        for index, name in enumerate(given.names)
        if index not in used
    ]


def _refuse(problems: Sequence[Problem], root: Path) -> None:
    lines = [f"  {problem}" for problem in problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"  and {len(problems) - SHOWN} more")
    raise CohortError(
        f"{len(problems)} problems in {root}; no cohort was written:\n" + "\n".join(lines) + "\n"
        'Mend them, or leave the slides out with on_error="skip" (--on-error skip), which lists them in rejected.csv.'
    )


def _run(folder: Folder, files: Sequence, work: Path | None) -> list[Written]:
    """Every part checked, and written below `work` if given; a second time if the first file was not typical."""
    sizes = [file.path.stat().st_size for file in files]
    if work is not None:
        shutil.rmtree(work / "cohort", ignore_errors=True)  # of an assembly that was cut short
        work.mkdir(parents=True, exist_ok=True)
        _check_room(work, sum(sizes))
    shape = first_shape(folder.format, files)
    parts = plan_parts(files, sizes)
    written = _pass(folder.format, parts, shape, work)
    settled = settled_shape([outcome for part in written for outcome in part.outcomes], shape)
    return written if settled == shape else _pass(folder.format, parts, settled, work)


def _check_room(work: Path, size: int) -> None:
    present = sum(path.stat().st_size for path in work.glob("*.parquet"))
    free, needed = shutil.disk_usage(work).free, size * ROOM - present
    if needed > free:
        raise CohortError(
            f"the disk of {work.parent} is too full: the cohort needs about {needed / 2**30:.1f} GB, "
            f"{free / 2**30:.1f} GB are free; nothing was written"
        )


def _pass(format: str, parts: Sequence[tuple], shape: Shape, work: Path | None) -> list[Written]:
    from deco_ray.cohort.stream import run_blocks  # Ray is started by those who ingest, not by those who import

    plans = [PartPlan(format, part, shape) for part in parts]
    folder = None if work is None else work.absolute()

    def check_and_write(batch: pa.Table) -> pa.Table:
        index = batch["index"][0].as_py()
        try:
            answer: dict = {"outcomes": [asdict(outcome) for outcome in write_part(plans[index], folder)]}
        except CohortError as error:
            answer = {"error": str(error)}
        return pa.table({"index": [index], "answer": [json.dumps(answer)]})

    written = []
    manifest = [
        pa.table({"slide_id": [file.slide_id for file in plan.files], "index": [index] * len(plan.files)})
        for index, plan in enumerate(plans)
    ]
    with bar(sum(map(len, parts)), "ingest", "slide") as shown:
        for table in run_blocks(manifest, check_and_write):
            for index, text in zip(table["index"].to_pylist(), table["answer"].to_pylist()):
                answer = json.loads(text)
                if "error" in answer:
                    raise CohortError(answer["error"])
                written.append(Written(plans[index], [Outcome(**row) for row in answer["outcomes"]]))
                shown.update(len(parts[index]))
    return written


def _assemble(
    work: Path,
    target: Path,
    meta: CohortMeta,
    parts: Sequence[Written],
    known: dict[str, tuple[str, int]],
    problems: Sequence[Problem],
    assignments: dict[str, dict[str, str]],
) -> None:
    """The finished parts, the index, the splits and the rejects in one folder, renamed into place."""
    folder = work / "cohort"
    (folder / "patches").mkdir(parents=True)
    rows: list[dict] = []
    part = 0
    for written in parts:
        good = [outcome for outcome in written.outcomes if not outcome.reason]
        if good:
            os.rename(work / f"{written.plan.key}.parquet", folder / part_name(part))
            rows += [slide_row(asdict(o), *known[o.slide_id], part, group) for group, o in enumerate(good)]
            part += 1
    write_index(folder, meta, pd.DataFrame(rows))
    if problems:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerows([("slide_id", "file", "reason"), *((p.slide_id, p.file, p.reason) for p in problems)])
        write_atomically(folder / REJECTED, text.getvalue())
    cohort = Cohort.open(str(folder))
    present = set(cohort.slides["slide_id"])
    for name, assignment in assignments.items():
        kept = {slide: split for slide, split in assignment.items() if slide in present}
        save_split(cohort, new_split(cohort, name, kept, {"made_by": "import", "source": f"{name}.csv"}))
    os.rename(folder, target)
