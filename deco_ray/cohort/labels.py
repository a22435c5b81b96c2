"""The labels of slides: a CSV `case_id,slide_id,label` read as text, the order of classes, the normal class."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deco_ray.cohort.schema import UNLABELLED, check_slide_id
from deco_ray.errors import CohortError, ConfigError
from deco_ray.yaml_tree import parse_yaml

CLASSES_FILE = "classes.yaml"  # looked for beside the labels
COLUMNS = ("case_id", "slide_id", "label")
MOST_CLASSES = 1000  # of labels that are numbers: more is an id or a slip of the pen, and each number makes a class


@dataclass(frozen=True)
class LabelRow:
    slide_id: str
    case_id: str
    label: str  # as written: `007` stays `007`


@dataclass(frozen=True)
class Problem:
    """Why one slide cannot be taken: what stands in rejected.csv."""

    slide_id: str
    file: str
    reason: str

    def __str__(self) -> str:
        return f"slide {self.slide_id} ({self.file}): {self.reason}"


@dataclass(frozen=True)
class Classes:
    names: tuple[str, ...]
    normal: int = 0

    def index(self, label: str) -> int | None:
        """Class of a label given as a name, or as an integer that is not itself a name; none if it is neither."""
        if label in self.names:
            return self.names.index(label)
        return _numbered(label, len(self.names))


def _numbered(label: str, count: int) -> int | None:
    """Which of `count` classes a label gives by its number; none if it is no whole number or too large."""
    digits = label.lstrip("0") or "0"
    # counted first: int() refuses thousands of digits
    if not label.isascii() or not label.isdigit() or len(digits) > len(str(count)):
        return None
    return int(digits) if int(digits) < count else None


def read_labels(path: str | Path) -> list[LabelRow]:
    """Rows of the CSV in its order; a missing case_id means the slide is its own case."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, header = list(reader), list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CohortError(f"cannot read the labels {path}: {error}") from error
    columns = list(rows[0]) if rows else []
    missing = [name for name in ("slide_id", "label") if name not in columns]
    if missing:
        raise CohortError(
            f"labels {path}: no column {', '.join(missing)} (found {', '.join(map(str, columns)) or 'no rows'}); "
            "expected case_id,slide_id,label"
        )
    repeated = [name for name in COLUMNS if header.count(name) > 1]
    if repeated:
        raise CohortError(f"labels {path}: more than one column {', '.join(repeated)}; keep one, rename the others")
    cells = [{name: (row.get(name) or "").strip() for name in COLUMNS} for row in rows]
    return [
        LabelRow(row["slide_id"], row["case_id"] or row["slide_id"], row["label"]) for row in cells if any(row.values())
    ]


def resolve_classes(
    classes: Sequence[str] | str | Path | None, normal: str | int | None, labels: Sequence[str], beside: Path | None
) -> Classes:
    """Class order and normal class: given, or from a YAML (`classes: [...]`, `normal_class: ...`), or integers."""
    if classes is None and beside is not None and (beside / CLASSES_FILE).is_file():
        classes = beside / CLASSES_FILE
    if isinstance(classes, str | Path):
        names, stated = _classes_file(Path(classes))
        normal = stated if normal is None else normal
    elif classes is not None:
        names = tuple(str(name).strip() for name in classes)
    else:
        names = _from_integers(labels)
    if len(set(names)) != len(names) or not all(names):
        raise CohortError(f"class names must differ and not be empty: {', '.join(names)}")
    return Classes(names, _normal_index(names, normal))


def _classes_file(path: Path) -> tuple[tuple[str, ...], str | int | None]:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"), "it", all_text=True)  # `no` and `007` stay names
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise CohortError(f"cannot read the classes {path}: {error}") from error
    held = content if isinstance(content, dict) else {}
    names, normal = held.get("classes"), held.get("normal_class")
    if isinstance(names, list) and names and all(isinstance(text, str) for text in (*names, normal or "")):
        return tuple(names), normal
    raise CohortError(f"{path} must hold `classes: [first, second, ...]` and may hold `normal_class: name`")


def _from_integers(labels: Sequence[str]) -> tuple[str, ...]:
    found = sorted(set(labels))
    if found and all(label.isascii() and label.isdigit() for label in found):
        numbers = [_numbered(label, MOST_CLASSES) for label in found]
        if None in numbers:
            large = found[numbers.index(None)]
            raise CohortError(
                f"the label {large[:40]} would make more than {MOST_CLASSES} classes, one for every number up to it; "
                f"correct it, or give --classes or a {CLASSES_FILE} beside the labels with `classes: [...]`"
            )
        return tuple(str(index) for index in range(max(filter(None, numbers), default=0) + 1))
    raise CohortError(
        f"the order of the classes is not given; the labels hold {', '.join(found[:12]) or 'nothing'}: pass them in "
        f"order (the normal class first), or write {CLASSES_FILE} beside the labels with `classes: [...]`"
    )


def _normal_index(names: tuple[str, ...], normal: str | int | None) -> int:
    if normal is None:
        return 0
    if str(normal) in names:
        return names.index(str(normal))
    index = _numbered(str(normal), len(names))
    if index is not None:
        return index
    raise CohortError(f"normal class {normal!r} is not among the classes: {', '.join(names)}")


def match_labels(
    files: Sequence[tuple[str, str]], rows: Sequence[LabelRow], classes: Classes, labels_file: str
) -> tuple[dict[str, tuple[str, int]], list[Problem]]:
    """Case and class of every slide that has both features and a valid label; a problem for every one that has not.

    `files` are (slide id, file name) pairs.
    """
    problems: list[Problem] = []
    labelled: dict[str, LabelRow] = {}
    repeated: set[str] = set()
    for row in rows:
        if row.slide_id in labelled:
            repeated.add(row.slide_id)
        labelled[row.slide_id] = row
    present = {slide for slide, _ in files}
    matched: dict[str, tuple[str, int]] = {}
    for slide, row in labelled.items():
        index = classes.index(row.label)
        try:
            check_slide_id(slide)
        except CohortError as error:
            problems.append(Problem(slide, labels_file, str(error)))
            continue
        if slide in repeated:
            problems.append(Problem(slide, labels_file, "duplicate slide id: labelled more than once"))
        elif index is None:
            known = ", ".join(classes.names)
            problems.append(Problem(slide, labels_file, f"label {row.label!r} is not among the classes: {known}"))
        elif slide not in present:
            problems.append(Problem(slide, labels_file, "labelled but has no feature file"))
        else:
            matched[slide] = row.case_id, index
    problems += [
        Problem(slide, file, f"has no label in {labels_file}") for slide, file in files if slide not in labelled
    ]
    return matched, problems


def without_labels(files: Sequence[tuple[str, str]]) -> dict[str, tuple[str, int]]:
    """Slides nobody has graded, for prediction: each its own case."""
    return {slide: (slide, UNLABELLED) for slide, _ in files}


def check_files(files: Sequence[tuple[str, str]]) -> list[Problem]:
    """Feature files whose slide id is unusable or used twice."""
    problems = []
    first: dict[str, str] = {}
    for slide, file in files:
        try:
            check_slide_id(slide)
        except CohortError as error:
            problems.append(Problem(slide, file, str(error)))
        if slide in first:
            problems.append(Problem(slide, file, f"duplicate slide id: {first[slide]} has it too"))
        first.setdefault(slide, file)
    return problems
