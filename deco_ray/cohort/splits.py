"""Splits of a cohort, made by the paper's protocol or given; splits/<name>.parquet remembers how and for which data."""

from __future__ import annotations

import functools
import io
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from deco_ray.artefacts import digest, write_atomically
from deco_ray.cohort.protocol import assign, describe_groups, frequency_groups, long_tail_counts, realised_ratio
from deco_ray.cohort.schema import SPLIT, SPLIT_NAMES, UNLABELLED
from deco_ray.cohort.store import Cohort, locate
from deco_ray.config import SplitSection
from deco_ray.errors import CohortError

__all__ = [
    "Split",
    "describe_groups",
    "frequency_groups",
    "leaks",
    "load_split",
    "long_tail_counts",
    "make_split",
    "new_split",
    "realised_ratio",
    "resolve_split",
    "save_split",
    "split_names",
]

METADATA_KEY = b"deco_ray"  # of the Parquet schema; holds JSON


@dataclass(frozen=True)
class Split:
    """Which labelled slide is for what; `assignment` is in the cohort's order, metadata says how it was made."""

    name: str
    assignment: Mapping[str, str]  # slide_id -> train, val, test or unused
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def ids(self, part: str) -> list[str]:
        """Slide ids of train, val, test or unused, in the cohort's order."""
        if part not in SPLIT_NAMES:
            raise CohortError(f"a split has {', '.join(SPLIT_NAMES)}; not {part!r}")
        return [slide for slide, assigned in self.assignment.items() if assigned == part]

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the slides of each part and the data behind them; not the name."""
        return digest({"assignment": dict(self.assignment), "cohort": self.metadata["cohort"]})

    def counts(self, cohort: Cohort, part: str) -> list[int]:
        """Slides of each class in one part."""
        label_of = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
        found = Counter(int(label_of[slide]) for slide in self.ids(part))
        return [found[label] for label in range(len(cohort.classes))]

    def train_counts(self, cohort: Cohort) -> list[int]:
        return self.counts(cohort, "train")


def make_split(cohort: Cohort, section: SplitSection) -> Split:
    """The split of the section's keys; the same for any order of rows, its val and test the same for any ratio."""
    part_of = assign(cohort, section)
    settings = section.model_dump(mode="json", exclude={"name"})
    ratio = "natural" if section.imbalance_ratio is None else f"ir{section.imbalance_ratio:g}"
    return new_split(cohort, section.name or f"{ratio}_seed{section.seed}", part_of, {"made_by": "quotas", **settings})


def new_split(cohort: Cohort, name: str, part_of: Mapping[str, str], metadata: Mapping[str, Any]) -> Split:
    """A split of this cohort from any assignment; slides not mentioned are unused, unlabelled ones left out."""
    _check_name(name)
    labels = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
    unknown = [slide for slide in part_of if slide not in labels]
    if unknown:
        raise CohortError(f"split {name}: {len(unknown)} slides are not in cohort {cohort.name}, first {unknown[0]!r}")
    for slide, part in part_of.items():
        if part not in SPLIT_NAMES:
            raise CohortError(f"split {name}: slide {slide} is in {part!r}, not one of {', '.join(SPLIT_NAMES)}")
        if labels[slide] == UNLABELLED and part != "unused":
            raise CohortError(f"split {name}: slide {slide} is in {part!r} but has no label")
    assignment = {slide: part_of.get(slide, "unused") for slide, label in labels.items() if label != UNLABELLED}
    return Split(name, assignment, {**metadata, "cohort": cohort.checksum})


def _check_name(name: str) -> None:
    """A split's name is its file's name, so it must stay in its folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or ".." in name:
        raise CohortError(
            f"split name {name!r}: use letters, digits, '.', '_' and '-', starting with a letter or digit"
        )


def leaks(cohort: Cohort, split: Split) -> list[str]:
    """One line for each patient with slides in more than one of train, val and test."""
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for slide, case in zip(cohort.slides["slide_id"], cohort.slides["case_id"]):
        part = split.assignment.get(slide, "unused")
        if part != "unused" and pd.notna(case) and case:
            parts[str(case)].setdefault(part, slide)
    return [
        f"case {case}: " + ", ".join(f"{slide} in {part}" for part, slide in sorted(found.items()))
        for case, found in parts.items()
        if len(found) > 1
    ]


def save_split(cohort: Cohort, split: Split, overwrite: bool = False) -> str:
    """Write splits/<name>.parquet beside the cohort and return where; another split of that name is kept."""
    filesystem, root = locate(cohort.uri)
    path = f"{root}/splits/{split.name}.parquet"
    if not overwrite and filesystem.get_file_info(path).type == fs.FileType.File:
        if load_split(cohort, split.name).digest == split.digest:
            return path
        raise CohortError(f"{path} holds another split; choose another name, or overwrite=True (--overwrite)")
    table = pa.table([list(split.assignment), list(split.assignment.values())], schema=SPLIT)
    text = json.dumps(dict(split.metadata), sort_keys=True).encode()
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({METADATA_KEY: text}), buffer)
    try:
        if isinstance(filesystem, fs.LocalFileSystem):
            write_atomically(path, buffer.getvalue())
        else:
            with filesystem.open_output_stream(path) as file:  # an object appears only when complete
                file.write(buffer.getvalue())
    except OSError as error:
        raise CohortError(f"cannot write split {path}: {error}") from error
    return path


def load_split(cohort: Cohort, name: str) -> Split:
    """The stored split, refused if the cohort's slides, labels or features changed since it was made."""
    _check_name(name)
    filesystem, root = locate(cohort.uri)
    path = f"{root}/splits/{name}.parquet"
    try:
        with filesystem.open_input_file(path) as file:
            table = pq.read_table(io.BytesIO(file.read()), columns=SPLIT.names)
        part_of = dict(zip(*(table[column].to_pylist() for column in SPLIT.names)))
    except FileNotFoundError:
        known = ", ".join(split_names(cohort)) or "none"
        raise CohortError(f"cohort {cohort.name} has no split {name!r}; stored: {known}") from None
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise CohortError(f"cannot read split {path}: {error}; make it again with `deco-ray split`") from error
    metadata = _metadata(table, path)
    made_for = metadata.pop("cohort", None)
    if made_for is not None and made_for != cohort.checksum:
        raise CohortError(
            f"split {name!r} was made for other data (checksum {made_for[:8]}, now {cohort.checksum[:8]}): "
            f"the cohort at {root} has changed; make the split again with `deco-ray split`"
        )
    return new_split(cohort, name, part_of, metadata)


def _metadata(table: pa.Table, path: str) -> dict[str, Any]:
    """What the file says about itself; a table made elsewhere may say nothing."""
    try:
        return dict(json.loads((table.schema.metadata or {}).get(METADATA_KEY, b"{}")))
    except ValueError as error:
        raise CohortError(f"split {path} has damaged metadata: {error}; make it again with `deco-ray split`") from error


def split_names(cohort: Cohort) -> list[str]:
    """Names of the stored splits."""
    filesystem, root = locate(cohort.uri)
    files = filesystem.get_file_info(fs.FileSelector(f"{root}/splits", allow_not_found=True))
    return sorted(file.base_name.removesuffix(".parquet") for file in files if file.extension == "parquet")


def resolve_split(cohort: Cohort, section: SplitSection) -> Split:
    """The split a configuration asks for: the stored one it names, else the one its keys make; warns of leaks."""
    split = load_split(cohort, section.name) if section.name else make_split(cohort, section)
    found = leaks(cohort, split)
    if found:
        warnings.warn(
            f"split {split.name}: {len(found)} patients have slides in more than one part ({found[0]}); "
            "split.group_by=case_id keeps patients together",
            stacklevel=2,
        )
    return split
