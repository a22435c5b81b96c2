"""Reading a cohort: open it anywhere pyarrow can, get any slide as a bag in one random-access read."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs
from torch import Tensor

from deco_ray.cohort.schema import CohortMeta, parse_meta, part_name
from deco_ray.errors import CohortError

OPEN_PARTS = 16  # parsed Parquet footers kept per process


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
        self._row_of = {slide: row for row, slide in enumerate(slides["slide_id"])}

    @classmethod
    def open(cls, uri: str) -> Cohort:
        filesystem, root = locate(uri)
        meta = parse_meta(_read(filesystem, f"{root}/cohort.json", uri), str(uri))
        with filesystem.open_input_file(f"{root}/slides.parquet") as file:
            slides = pq.read_table(file).to_pandas()
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
        if slide_id not in self._row_of:
            raise CohortError(f"slide {slide_id!r} is not in cohort {self.name} at {self.uri}")
        return self.slides.iloc[self._row_of[slide_id]].to_dict()

    def bag(self, slide_id: str) -> Bag:
        row = self.row(slide_id)
        table = read_row_group(self.uri, int(row["part"]), int(row["row_group"]), str(slide_id))
        return Bag(str(slide_id), unit_rows(decode(table["feature"], self.meta)), coordinates(table), int(row["label"]))

    def bags(self, slide_ids: Sequence[str]):
        """Bags in the given order, read one after another in this process."""
        return (self.bag(slide_id) for slide_id in slide_ids)

    def __reduce__(self):
        return Cohort, (self.uri, self.meta, self.slides)


def locate(uri: str) -> tuple[fs.FileSystem, str]:
    """Filesystem and path of a local folder or an s3:// or gs:// URI."""
    try:
        if "://" in str(uri):
            return fs.FileSystem.from_uri(str(uri).rstrip("/"))
        return fs.LocalFileSystem(), str(uri).rstrip("/")
    except (pa.ArrowInvalid, OSError) as error:
        raise CohortError(f"cannot open {uri}: {error}") from error


def _read(filesystem: fs.FileSystem, path: str, uri: str) -> bytes:
    try:
        with filesystem.open_input_file(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise CohortError(
            f"no cohort at {uri} (no cohort.json there); make one with `deco-ray ingest` or `deco-ray synth`"
        ) from None
    except OSError as error:
        raise CohortError(f"cannot read {path}: {error}") from error


@functools.lru_cache(maxsize=OPEN_PARTS)
def open_part(uri: str, part: int) -> pq.ParquetFile:
    filesystem, root = locate(uri)
    path = f"{root}/{part_name(part)}"
    source = pa.memory_map(path) if isinstance(filesystem, fs.LocalFileSystem) else filesystem.open_input_file(path)
    return pq.ParquetFile(source)


def read_row_group(uri: str, part: int, row_group: int, slide_id: str) -> pa.Table:
    try:
        return open_part(uri, part).read_row_group(row_group, columns=["x", "y", "feature"], use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise CohortError(
            f"slide {slide_id}: cannot read {uri}/{part_name(part)}, row group {row_group}: {error}; ingest the cohort again"
        ) from error


def decode(column: pa.ChunkedArray, meta: CohortMeta) -> np.ndarray:
    """The feature column as [N, d] without copying; mind each chunk's offset."""
    itemsize = np.dtype(meta.dtype).itemsize
    blocks = []
    for chunk in column.chunks:
        start, count = chunk.offset * meta.dim * itemsize, len(chunk) * meta.dim
        blocks.append(
            np.frombuffer(chunk.buffers()[1], f"<{meta.dtype[0]}{itemsize}", count, start).reshape(-1, meta.dim)
        )
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def unit_rows(features: np.ndarray) -> Tensor:
    """Float32 rows of unit length (Eq. 1); ingest refused all-zero rows."""
    rows = torch.from_numpy(np.array(features, dtype=np.float32))
    return rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True))


def coordinates(table: pa.Table) -> np.ndarray | None:
    if table["x"].null_count:
        return None
    return np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1).astype(np.int64)
