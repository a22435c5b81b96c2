"""Reading a cohort: open it anywhere pyarrow can, get any slide as a bag in one random-access read."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch import Tensor

from deco_ray.cohort.pages import Part
from deco_ray.cohort.schema import SLIDES, UNLABELLED, CohortMeta, check_slide_id, parse_meta, part_name
from deco_ray.cohort.writer import cohort_checksum, slide_checksum
from deco_ray.errors import CohortError

OPEN_PARTS = 16  # parsed Parquet footers kept per process
# bags are computed from the file's memory, which nobody may write to; torch would warn of that once
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


@dataclass(frozen=True)
class Bag:
    """One slide: unit-norm patch features (Eq. 1), coordinates if known, label."""

    slide_id: str
    features: Tensor  # float32 [N, d], unit rows
    coords: np.ndarray | None  # int64 [N, 2], top-left corner in level-0 pixels
    label: int


class Cohort:
    """An opened cohort; cheap to pickle, safe to share between processes."""

    def __init__(self, uri: str, meta: CohortMeta, slides: pd.DataFrame) -> None:
        self.uri, self.meta, self.slides = uri, meta, slides

    @classmethod
    def open(cls, uri: str | os.PathLike[str]) -> Cohort:
        filesystem, root = locate(str(uri))
        meta = parse_meta(_read(filesystem, f"{root}/cohort.json", str(uri)), shown(uri))
        try:
            with filesystem.open_input_file(f"{root}/slides.parquet") as file:
                table = pq.read_table(file).select(SLIDES.names)
            table.validate(full=True)  # ids that are no text would only be noticed where somebody uses them
            slides = table.to_pandas(ignore_metadata=True)
            check_slides(slides, meta)
            # of what is there now: a label or a normal class changed by hand makes another cohort
            meta = meta.model_copy(update={"checksum": cohort_checksum(meta, slides)})
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException, CohortError) as error:
            raise CohortError(f"cannot read {shown(uri)}/slides.parquet: {error}; ingest the cohort again") from error
        return cls(str(uri), meta, slides)

    @property
    def name(self) -> str:
        return self.meta.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.meta.classes

    @property
    def dim(self) -> int:
        return self.meta.dim

    @property
    def checksum(self) -> str:
        return self.meta.checksum

    def row(self, slide_id: str) -> dict[str, Any]:
        """The slide's row of slides.parquet."""
        facts = self.slides.iloc[self._place(slide_id)[0]]
        return {str(name): value for name, value in facts.items()}

    def bag(self, slide_id: str, *, verify: bool = False) -> Bag:
        """The slide's patches in the order they were stored.

        `verify` compares them with the checksum of the ingest, which costs a multiple of reading them: done where
        features enter a run, not at every use.
        """
        row, part, row_group, label = self._place(slide_id)
        features, lengths, coords = self._patches(str(slide_id), part, row_group)
        size, checksum = self._ingested[row]
        if len(features) != size or (verify and checksum and slide_checksum(features, coords) != checksum):
            raise CohortError(
                f"slide {slide_id}: {shown(self.uri)}/{part_name(part)}, row group {row_group}, does not hold what was "
                "ingested; the cohort is damaged, ingest it again"
            )
        return Bag(str(slide_id), unit_rows(features, lengths), coords, label)

    def bags(self, slide_ids: Sequence[str]) -> Iterator[Bag]:
        """Bags in the given order, read one after another in this process."""
        return (self.bag(slide_id) for slide_id in slide_ids)

    @functools.cached_property
    def _places(self) -> dict[str, tuple[int, int, int, int]]:
        """Slide id -> row, part, row group, label: a data frame's own lookup costs as much as reading a bag."""
        columns = (self.slides[name].tolist() for name in ("slide_id", "part", "row_group", "label"))
        return {slide: (row, *rest) for row, (slide, *rest) in enumerate(zip(*columns))}

    @functools.cached_property
    def _ingested(self) -> list[tuple[int, str | None]]:
        """Number of patches and checksum of each slide."""
        return list(zip(self.slides["n_patches"].tolist(), self.slides["checksum"].tolist()))

    def _place(self, slide_id: str) -> tuple[int, int, int, int]:
        place = self._places.get(slide_id)
        if place is None:
            raise CohortError(f"slide {slide_id!r} is not in cohort {self.name} at {shown(self.uri)}")
        return place

    def _patches(self, slide_id: str, part: int, row_group: int) -> tuple[np.ndarray, Tensor, np.ndarray | None]:
        """Features [N, d] as stored (a view of the file where it can be mapped), their lengths, coordinates [N, 2]."""
        try:
            opened = open_part(self.uri, part, self._stamp(part))
            features, coords = opened.patches(row_group, self.meta.dim, self.meta.dtype)
            if row_group not in opened.lengths:  # a slide is read again every epoch; its lengths are the same
                opened.lengths[row_group] = lengths_of(features)
            return features, opened.lengths[row_group], coords
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:
            raise CohortError(
                f"slide {slide_id}: cannot read {shown(self.uri)}/{part_name(part)}, row group {row_group}: {error}; "
                "the cohort is damaged, ingest it again"
            ) from error

    def _stamp(self, part: int) -> str:
        """Changes when the part is replaced, so that nobody reads a new file through an old footer."""
        filesystem, root = locate(self.uri)
        if not isinstance(filesystem, fs.LocalFileSystem):
            return self.checksum  # a look at the object would cost a round trip per bag
        found = os.stat(f"{root}/{part_name(part)}")
        return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Cohort, (self.uri, self.meta, self.slides)


def check_slides(slides: pd.DataFrame, meta: CohortMeta) -> None:
    """A cohort may come from anywhere: its slide ids name files later, so they are checked as at ingest."""
    least = {"label": UNLABELLED, "n_patches": 1, "part": 0, "row_group": 0}
    most = {"label": len(meta.classes) - 1}
    for name, lowest in least.items():
        wrong = slides[name].isna() | (slides[name] < lowest) | (slides[name] > most.get(name, np.inf))
        if wrong.any():
            first = slides[wrong].iloc[0]
            raise CohortError(f"slide {first['slide_id']} cannot have the {name} {first[name]}")
    ids = slides["slide_id"].tolist()
    if slides["slide_id"].isna().any():
        raise CohortError("a slide has no id")
    for slide in ids:
        check_slide_id(slide)
    if len(set(ids)) != len(ids):
        doubled = slides["slide_id"][slides["slide_id"].duplicated()].iloc[0]
        raise CohortError(f"slide {doubled} is listed twice")


def shown(uri: str | os.PathLike[str]) -> str:
    """The URI for a message: without the credentials and options it may carry."""
    scheme, separator, rest = str(uri).partition("://")
    if not separator:
        return str(uri)
    # up to the last @: a secret may itself hold any character, a slash included
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"


def local_path(place: str | os.PathLike[str], what: str) -> Path:
    """The path of what must lie on a file system; a URI would become a folder named after its credentials."""
    if "://" in str(place):
        raise CohortError(f"{what} {shown(place)} is a URI; only a cohort can be one, give a folder")
    return Path(place)


@functools.lru_cache(maxsize=32)
def locate(uri: str) -> tuple[fs.FileSystem, str]:
    """Filesystem and path of a local folder or an s3:// or gs:// URI (options in its query, as pyarrow reads them)."""
    try:
        if "://" in uri:
            filesystem, path = fs.FileSystem.from_uri(uri)
            return filesystem, path.rstrip("/")
        return fs.LocalFileSystem(), uri.rstrip("/") or "/"
    except (pa.ArrowInvalid, OSError) as error:
        raise CohortError(f"cannot open {shown(uri)}: {str(error).replace(uri, shown(uri))}") from None


def _read(filesystem: fs.FileSystem, path: str, uri: str) -> bytes:
    try:
        with filesystem.open_input_file(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise CohortError(
            f"no cohort at {shown(uri)} (no cohort.json there); make one with `deco-ray ingest` or `deco-ray synth`"
        ) from None
    except OSError as error:
        raise CohortError(f"cannot read {path}: {error}") from error


@functools.lru_cache(maxsize=OPEN_PARTS)
def open_part(uri: str, part: int, stamp: str) -> Part:
    """The opened part; `stamp` says which of the files that ever had this name."""
    filesystem, root = locate(uri)
    path = f"{root}/{part_name(part)}"
    if isinstance(filesystem, fs.LocalFileSystem):
        return Part(pa.memory_map(path))
    return Part(filesystem.open_input_file(path))


def lengths_of(features: np.ndarray) -> Tensor:
    """Euclidean length of each row in float32, [N, 1]."""
    return torch.linalg.vector_norm(torch.from_numpy(features), dim=1, keepdim=True, dtype=torch.float32)


def unit_rows(features: np.ndarray, lengths: Tensor | None = None) -> Tensor:
    """Float32 rows of unit length (Eq. 1) in memory of their own; ingest refused all-zero rows."""
    # NumPy asks for huge pages where torch's own allocator takes a page fault every 4 kB
    rows = torch.from_numpy(np.empty(features.shape, np.float32))
    given = torch.from_numpy(features)
    if given.dtype != torch.float32:
        given = rows.copy_(given)
    return torch.div(given, lengths_of(features) if lengths is None else lengths, out=rows)
