"""One part of a cohort on its way in: its feature files checked, its slides written, its record kept.

A part is a pure function of its files: planned from their sizes, named by a digest of what they are, written
under a temporary name. So any number of workers gives the same bytes, and an interrupted ingest finds what it
has done already.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from deco_ray.artefacts import digest, write_atomically
from deco_ray.cohort.readers import READERS, Unreadable
from deco_ray.cohort.readers.raw import check_values
from deco_ray.cohort.schema import patch_schema
from deco_ray.cohort.sources import Source
from deco_ray.cohort.writer import PART_BYTES, SlideFeatures, part_writer, patch_table, slide_checksum
from deco_ray.errors import CohortError

LEAST_PARTS, LEAST_BYTES = 4, 32 * 2**20  # small cohorts are cut finer, so that a few cores share the work
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Shape:
    """What all slides of a cohort share."""

    dim: int
    dtype: str


@dataclass(frozen=True)
class Outcome:
    """What became of one feature file: a slide written, or the reason why not."""

    slide_id: str
    reason: str = ""
    dim: int = 0
    dtype: str = ""
    n_patches: int = 0
    patch_size_level0: float | None = None
    level0_width: int | None = None
    level0_height: int | None = None
    checksum: str = ""


@dataclass(frozen=True)
class PartPlan:
    format: str
    files: tuple[Source, ...]
    shape: Shape

    @property
    def key(self) -> str:
        """Names the part's files in the work folder; a changed or touched source is read again."""
        files = []
        for file in self.files:
            try:
                found = file.path.stat()
                files.append([file.slide_id, str(file.path), found.st_size, found.st_mtime_ns])
            except OSError:
                files.append([file.slide_id, str(file.path), 0, 0])
        return digest({"format": self.format, "shape": asdict(self.shape), "files": files})


def plan_parts(files: Sequence[Source], sizes: Sequence[int], part_bytes: int = PART_BYTES) -> list[tuple[Source, ...]]:
    """Consecutive files in shares of about equal bytes, none much over `part_bytes`; depends on nothing else."""
    total = sum(sizes)
    count = max(-(-total // part_bytes), min(LEAST_PARTS, -(-total // LEAST_BYTES)), 1)
    parts: list[list[Source]] = [[] for _ in range(count)]
    before = 0
    for file, size in zip(files, sizes):
        parts[min(count - 1, (before + size // 2) * count // max(total, 1))].append(file)
        before += size
    return [tuple(part) for part in parts if part]


def first_shape(format: str, files: Sequence[Source]) -> Shape:
    """The shape of the first file that can be read: a guess that `settled_shape` checks."""
    for file in files:
        try:
            features = READERS[format](file.path).features
        except (Unreadable, OSError):
            continue
        return Shape(features.shape[1], features.dtype.name)
    return Shape(1, "float32")  # nothing can be read: every file gets its reason


def settled_shape(outcomes: Sequence[Outcome], guess: Shape) -> Shape:
    """The dimension of most slides (of the first among equals); float16 only if all of those are."""
    dims = [outcome.dim for outcome in outcomes if outcome.dim]
    if not dims:
        return guess
    dim = max(dict.fromkeys(dims), key=dims.count)
    narrow = all(outcome.dtype == "float16" for outcome in outcomes if outcome.dim == dim)
    return Shape(dim, "float16" if narrow else "float32")


def write_part(plan: PartPlan, work: Path | None) -> list[Outcome]:
    """Checks the part's files and writes the good slides to <work>/<key>.parquet; without `work` it only checks.

    The record <key>.json is written last: a part without it, or with a damaged one, is written again.
    """
    if work is None:
        return [_take(file, plan)[0] for file in plan.files]
    key = plan.key
    record, target = work / f"{key}.json", work / f"{key}.parquet"
    if (known := _recorded(record, target)) is not None:
        return known
    temporary = work / f"{key}.{uuid.uuid4().hex[:8]}.tmp"
    outcomes, written = [], 0
    try:
        with part_writer(temporary, patch_schema(plan.shape.dim, plan.shape.dtype)) as writer:
            for file in plan.files:
                outcome, slide = _take(file, plan)
                outcomes.append(outcome)
                if slide is not None:
                    writer.write_table(patch_table(slide, plan.shape.dtype), row_group_size=outcome.n_patches)
                    written += 1
        if written:
            os.replace(temporary, target)
        size = target.stat().st_size if written else 0
        write_atomically(record, json.dumps({"bytes": size, "outcomes": [asdict(row) for row in outcomes]}))
    except OSError as error:
        if error.errno in FULL or "No space left" in str(error):
            raise CohortError(f"the disk of {work.parent} is full; free space there and ingest again") from error
        raise CohortError(f"cannot write to {work.parent}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return outcomes


def _recorded(record: Path, target: Path) -> list[Outcome] | None:
    """What an earlier attempt wrote; None unless both record and part are whole."""
    try:
        known = json.loads(record.read_text())
        whole = known["bytes"] == (target.stat().st_size if target.is_file() else 0)
        return [Outcome(**row) for row in known["outcomes"]] if whole else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _take(file: Source, plan: PartPlan) -> tuple[Outcome, SlideFeatures | None]:
    """One file read and checked; the slide only if it fits the cohort."""
    try:
        raw = READERS[plan.format](file.path)
        check_values(raw.features)
    except Unreadable as error:
        return Outcome(file.slide_id, str(error)), None
    except OSError as error:
        return Outcome(file.slide_id, f"cannot be read: {error.strerror or error}"), None
    n, dim = raw.features.shape
    geometry = raw.patch_size_level0, raw.level0_width, raw.level0_height
    if dim != plan.shape.dim:
        reason = f"features have {dim} dimensions, other slides {plan.shape.dim}"
        return Outcome(file.slide_id, reason, dim, raw.features.dtype.name), None
    features = np.ascontiguousarray(raw.features, plan.shape.dtype)
    checksum = slide_checksum(features, raw.coords)
    outcome = Outcome(file.slide_id, "", dim, raw.features.dtype.name, n, *geometry, checksum)
    return outcome, SlideFeatures(file.slide_id, "", 0, features, raw.coords)
