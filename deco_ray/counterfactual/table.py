"""The contribution table: one row per (training slide, non-empty anchor), and the ratios it turns into.

λ, r_max and the strategy only reshape the stored contributions, so none of them ever needs a rescore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from deco_ray.artefacts import read_file
from deco_ray.config import CounterfactualSection, MaskingSection
from deco_ray.counterfactual.effects import Contributions
from deco_ray.counterfactual.ratios import anchor_ratios
from deco_ray.errors import DecoError

TABLE_FILE = "contributions.parquet"
TABLE = pa.schema(
    [
        ("slide_id", pa.string()),
        ("label", pa.int32()),
        ("rival", pa.int32()),
        ("anchor", pa.int32()),
        ("n_patches", pa.int64()),
        ("effect_label", pa.float64()),  # E' of the slide's own class
        ("effect_rival", pa.float64()),  # E' of the rival
        ("mean_attention", pa.float64()),
    ]
)


def slide_rows(slide_id: str, found: Contributions) -> pa.Table:
    """The rows of one slide, anchors ascending."""
    k = len(found.anchors)
    columns = [
        pa.array([slide_id] * k, pa.string()),
        pa.array(np.full(k, found.label), pa.int32()),
        pa.array(np.full(k, found.rival), pa.int32()),
        pa.array(found.anchors, pa.int32()),
        pa.array(found.counts, pa.int64()),
        pa.array(found.effects[:, found.label], pa.float64()),
        pa.array(found.effects[:, found.rival], pa.float64()),
        pa.array(found.attention, pa.float64()),
    ]
    return pa.Table.from_arrays(columns, schema=TABLE)


def join_rows(tables: Iterable[pa.Table]) -> pa.Table:
    """The tables of slides, one after another; an empty table when there are none."""
    return pa.concat_tables([TABLE.empty_table(), *tables]).combine_chunks()


def write_table(table: pa.Table, folder: str | Path) -> Path:
    path = Path(folder) / TABLE_FILE
    pq.write_table(table.cast(TABLE), path, compression="zstd")
    return path


def read_table(path: str | Path) -> pa.Table:
    """The table of an artefact folder, or of a file."""
    path = Path(path)
    path = path / TABLE_FILE if path.is_dir() else path
    try:
        return pq.read_table(pa.BufferReader(read_file(path)), schema=TABLE)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DecoError(
            f"cannot read the contribution table {path}: {error}; delete its folder and score again"
        ) from error


def slide_ratios(
    table: pa.Table | pd.DataFrame | str | Path,
    labels: Mapping[str, int],
    normal_class: int,
    section: MaskingSection,
    seed: int,
    k: int,
) -> dict[str, np.ndarray]:
    """Masking ratios float64 [K] of every slide in `labels`: r_k at its non-empty anchors, 0 elsewhere. Eq. 8-9

    Slides of the normal class keep everything (all zeros) and need no rows; any other slide without rows is
    an error, unless nothing is to be masked.
    """
    if isinstance(table, (str, Path)):
        table = read_table(table)
    frame = table.to_pandas() if isinstance(table, pa.Table) else table
    if len(frame) and int(frame["anchor"].max()) >= k:
        raise DecoError(f"the contribution table knows anchor {frame['anchor'].max()}, but only {k} anchors exist")
    groups = frame.groupby("slide_id", sort=False).indices
    columns = {name: frame[name].to_numpy() for name in frame.columns if name != "slide_id"}
    ratios = {}
    for slide_id, label in labels.items():
        row = ratios[slide_id] = np.zeros(k)
        if label == normal_class or section.strategy == "none":
            continue
        if slide_id not in groups:
            raise DecoError(f"slide {slide_id} has no rows in the contribution table; score it first")
        rows = groups[slide_id]
        rows = rows[np.argsort(columns["anchor"][rows])]  # a random permutation must not depend on the table's order
        one = {name: column[rows] for name, column in columns.items()}
        scores = anchor_scores(one["effect_label"], one["effect_rival"], section.lam)
        row[one["anchor"]] = anchor_ratios(section, scores, one["n_patches"], one["mean_attention"], seed, slide_id)
    return ratios


def anchor_scores(effect_label: np.ndarray, effect_rival: np.ndarray, lam: float) -> np.ndarray:
    return effect_label - lam * effect_rival  # Eq. 8


def contribution_inputs(anchors: str, judge: str, section: CounterfactualSection) -> dict[str, Any]:
    """What a contribution table depends on: two digests (which hold cohort, split, seed, threads) and the section."""
    return {"anchors": anchors, "judge": judge, **section.model_dump(mode="json")}
