"""Writing a cohort: slides in order, one row group each, parts of about 128 MB, renamed into place when complete."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from deco_ray.cohort.schema import SLIDES, CohortMeta, check_slide_id, part_name, patch_schema
from deco_ray.errors import CohortError

PART_BYTES = 128 * 2**20
PAGE_BYTES = 2**30  # more than any slide: Parquet allows pages below 2 GB
BATCH_ROWS = 2**20


@dataclass(frozen=True)
class SlideFeatures:
    """One slide on its way into a cohort."""

    slide_id: str
    case_id: str
    label: int
    features: np.ndarray  # [N, d] float32 or float16
    coords: np.ndarray | None = None  # [N, 2] level-0 pixels
    patch_size_level0: float | None = None
    level0_width: int | None = None
    level0_height: int | None = None


def slide_checksum(features: np.ndarray, coords: np.ndarray | None) -> str:
    sha = hashlib.sha256(np.ascontiguousarray(features).data)  # the one hash that processors speed up
    if coords is not None:
        sha.update(np.ascontiguousarray(coords, dtype=np.int32).data)
    return sha.hexdigest()[:32]


def patch_table(slide: SlideFeatures, dtype: str) -> pa.Table:
    """One slide as a table of patches; the feature column wraps the array's own memory."""
    features = np.ascontiguousarray(slide.features, dtype=f"<{dtype[0]}{np.dtype(dtype).itemsize}")
    n, dim = features.shape
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(dim * features.itemsize), n, [None, pa.py_buffer(features)])
    xy = [pa.nulls(n, pa.int32())] * 2
    if slide.coords is not None:
        xy = [pa.array(np.ascontiguousarray(slide.coords[:, axis], dtype=np.int32)) for axis in (0, 1)]
    ids = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([slide.slide_id])).cast(pa.string())
    return pa.table([ids, *xy, column], schema=patch_schema(dim, dtype))


def part_writer(path: str | Path, schema: pa.Schema) -> pq.ParquetWriter:
    """A part file whose columns are one plain page per slide, which readers use where it lies (pages.py)."""
    return pq.ParquetWriter(
        path,
        schema,
        compression="none",
        use_dictionary=["slide_id"],
        write_statistics=False,  # of random bytes they cost time and serve nobody
        data_page_size=PAGE_BYTES,
        write_batch_size=BATCH_ROWS,
    )


class CohortWriter:
    """`with CohortWriter(path, meta) as writer: writer.add(slide)`; an error leaves nothing at `path`."""

    def __init__(self, path: str | Path, meta: CohortMeta, part_bytes: int = PART_BYTES) -> None:
        self.path, self.meta, self.part_bytes = Path(path), meta, part_bytes
        self.folder = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:8]}.tmp")
        self.rows: list[dict] = []
        self.part, self.row_group, self.bytes = -1, 0, part_bytes  # the first slide opens part 0
        self.file: pq.ParquetWriter | None = None

    def __enter__(self) -> CohortWriter:
        if self.path.exists():
            raise CohortError(f"{self.path} exists already; choose another folder or remove it first")
        (self.folder / "patches").mkdir(parents=True)
        return self

    def add(self, slide: SlideFeatures) -> None:
        check_slide_id(slide.slide_id)
        table = patch_table(slide, self.meta.dtype)
        if self.bytes >= self.part_bytes:
            self._next_part(table.schema)
        assert self.file is not None
        self.file.write_table(table, row_group_size=max(1, len(table)))
        stored = slide.features.astype(self.meta.dtype, copy=False)
        facts = {**vars(slide), "n_patches": len(table), "checksum": slide_checksum(stored, slide.coords)}
        self.rows.append(slide_row(facts, slide.case_id, slide.label, self.part, self.row_group))
        self.row_group += 1
        self.bytes += table.nbytes

    def _next_part(self, schema: pa.Schema) -> None:
        if self.file is not None:
            self.file.close()
        self.part, self.row_group, self.bytes = self.part + 1, 0, 0
        self.file = part_writer(self.folder / part_name(self.part), schema)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.file is not None:
                self.file.close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _finish(self) -> None:
        write_index(self.folder, self.meta, pd.DataFrame(self.rows, columns=SLIDES.names))
        os.rename(self.folder, self.path)


def slide_row(facts: Mapping[str, Any], case_id: str, label: int, part: int, row_group: int) -> dict[str, Any]:
    """The slide's row of slides.parquet."""
    place = {"case_id": case_id, "label": label, "part": part, "row_group": row_group}
    return {name: place[name] if name in place else facts[name] for name in SLIDES.names}


def write_index(folder: Path, meta: CohortMeta, slides: pd.DataFrame) -> None:
    """slides.parquet and, last, cohort.json with the checksum of all slides."""
    pq.write_table(pa.Table.from_pandas(slides, schema=SLIDES, preserve_index=False), folder / "slides.parquet")
    meta = meta.model_copy(update={"checksum": cohort_checksum(meta, slides)})
    (folder / "cohort.json").write_text(json.dumps(meta.model_dump(), indent=1))


def cohort_checksum(meta: CohortMeta, slides: pd.DataFrame) -> str:
    """Identifies the data: ids, labels, features, coordinates, class names; not the name or the place."""
    facts: list[Any] = [list(meta.classes), meta.normal_class, meta.dim, meta.dtype]
    facts += zip(*(slides[name].tolist() for name in ("slide_id", "case_id", "label", "checksum")))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
