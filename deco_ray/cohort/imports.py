"""Splits that other tools made: CLAM's splits_<i>.csv and MIL_BASELINE's path-and-label CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path, PurePath, PureWindowsPath

from deco_ray.errors import CohortError

PARTS = ("train", "val", "test")
FEATURE_ENDINGS = (".pt", ".h5", ".npy", ".hdf5")


def read_clam_split(path: str | Path) -> dict[str, str]:
    """Slide id -> train, val or test, from ragged columns of ids or from CLAM's table of booleans."""
    header, rows = _table(path)
    columns = _columns(path, header, "")
    if "train" not in columns:
        raise CohortError(f"{path} has the columns {', '.join(header)}; CLAM's splits have train,val,test")
    filled = [(part, row, row[at].strip()) for part, at in columns.items() for row in rows if at < len(row)]
    if {cell for _, _, cell in filled} - {"True", "False"}:
        return _assignment(path, [(part, cell) for part, _, cell in filled])
    if header[0] in columns:
        raise CohortError(f"{path} is a table of booleans without the slide ids; CLAM has them in the first column")
    return _assignment(path, [(part, row[0].strip()) for part, row, cell in filled if cell == "True"])


def read_mil_baseline_split(path: str | Path) -> dict[str, str]:
    """Slide id -> train, val or test, from ragged columns of feature paths; the file's name is the slide id."""
    header, rows = _table(path)
    columns = _columns(path, header, "_slide_path")
    if "train" not in columns:
        raise CohortError(f"{path} has the columns {', '.join(header)}; expected train_slide_path,train_label,...")
    cells = [(part, _stem(row[at].strip())) for part, at in columns.items() for row in rows if at < len(row)]
    return _assignment(path, cells)


def read_split(path: str | Path) -> dict[str, str]:
    """Either kind, told apart by its header."""
    header, _ = _table(path)
    return read_mil_baseline_split(path) if "train_slide_path" in header else read_clam_split(path)


def split_files(folder: Path) -> list[Path]:
    """CLAM's splits in the folder or its `splits`; the booleans and the counts beside them say the same again."""
    found = [path for place in (folder, folder / "splits") for path in place.glob("splits_*.csv")]
    return sorted(path for path in found if not path.stem.endswith(("_bool", "_descriptor")))


def _table(path: str | Path) -> tuple[list[str], list[list[str]]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CohortError(f"cannot read the split {path}: {error}") from error
    if not rows:
        raise CohortError(f"the split {path} is empty")
    return [name.strip() for name in rows[0]], rows[1:]


def _columns(path: str | Path, header: list[str], ending: str) -> dict[str, int]:
    """Where the column of each part is; one given twice is refused, since only one would be read."""
    names = {part: f"{part}{ending}" for part in PARTS}
    for name in names.values():
        if header.count(name) > 1:
            raise CohortError(f"split {path}: more than one column {name}; keep one, rename the others")
    return {part: header.index(name) for part, name in names.items() if name in header}


def _stem(path: str) -> str:
    name = (PureWindowsPath(path) if "\\" in path else PurePath(path)).name
    return name[: name.rindex(".")] if name.endswith(FEATURE_ENDINGS) else name


def _assignment(path: str | Path, cells: Iterable[tuple[str, str]]) -> dict[str, str]:
    assignment: dict[str, str] = {}
    for part, slide in cells:
        if slide and assignment.setdefault(slide, part) != part:
            raise CohortError(f"split {path}: slide {slide} is in {assignment[slide]} and in {part}")
    if not assignment:
        raise CohortError(f"the split {path} names no slides")
    return assignment
