"""The anchor of every training patch on disk: one row a slide, with its counts per anchor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from deco_ray.anchors.artefact import AnchorError, Anchors
from deco_ray.artefacts import read_file
from deco_ray.cohort.store import Bag

FILE = "assignments.parquet"
ROWS_AT_ONCE = 256  # slides of one row group


@dataclass(frozen=True)
class Assign:
    """What a Ray Data task does with one training slide: the anchor of each patch (Eq. 4)."""

    anchors: Anchors

    def __call__(self, bag: Bag) -> dict[str, np.ndarray]:
        return {"assignment": self.anchors.assign(bag.features).astype(np.int16)}  # K is at most 4096


def write_assignments(folder: Path, k: int, slides: Iterable[tuple[str, int, np.ndarray]]) -> None:
    """(slide_id, label, assignment [N]) of each slide, as they come, into one file."""
    schema = pa.schema(
        [
            ("slide_id", pa.string()),
            ("label", pa.int32()),
            ("assignment", pa.binary()),  # int16 little-endian [N]
            ("counts", pa.list_(pa.int32(), k)),  # patches of each anchor
        ]
    )
    with pq.ParquetWriter(folder / FILE, schema) as writer:
        rows: list[dict] = []
        for slide, label, assignment in slides:
            counts = np.bincount(assignment, minlength=k)
            content = np.ascontiguousarray(assignment, "<i2").tobytes()
            rows.append({"slide_id": slide, "label": label, "assignment": content, "counts": counts.tolist()})
            if len(rows) == ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows = []
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))


def load_assignments(folder: str | Path) -> dict[str, np.ndarray]:
    """Training slide -> anchor of each patch, int16 [N], patches in the cohort's order."""
    table = _read(folder, ["slide_id", "assignment"])
    return {
        slide: np.frombuffer(content.as_buffer(), "<i2")
        for slide, content in zip(table["slide_id"].to_pylist(), table["assignment"])
    }


def load_counts(folder: str | Path) -> tuple[pd.DataFrame, pd.Series]:
    """Patches per slide (index) and anchor (columns 0 to K-1), and the label of each slide."""
    table = _read(folder, ["slide_id", "label", "counts"])
    slides = pd.Index(table["slide_id"].to_pylist(), name="slide_id")
    flat = table["counts"].combine_chunks().flatten().to_numpy()
    counts = pd.DataFrame(flat.reshape(len(slides), -1), index=slides)
    return counts, pd.Series(table["label"].to_numpy(), index=slides, name="label")


def _read(folder: str | Path, columns: list[str]) -> pa.Table:
    path = Path(folder) / FILE
    try:
        return pq.read_table(pa.BufferReader(read_file(path)), columns=columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise AnchorError(f"cannot read {path}: {error}; remove its folder and run the anchors stage again") from error
