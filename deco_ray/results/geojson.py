"""Patches with their values as GeoJSON for QuPath (one tile per patch) and as Parquet for everything else."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deco_ray.artefacts import write_atomically

NAMESPACE = uuid.UUID("6f1c0f8e-1f4b-5d0a-9c58-0c7a3f7e2b11")  # fixed: the same patch keeps its id in every export


def write_geojson(
    path: str | Path, slide_id: str, coords: np.ndarray, patch_size: float, values: Mapping[str, np.ndarray]
) -> None:
    """A FeatureCollection (RFC 7946 structure, level-0 pixels) with one `tile` object per patch and its measurements.

    Pixel coordinates, not longitude and latitude: that is QuPath's convention. Values that are not finite are left out.
    """
    corners = _plain(np.asarray(coords))
    side = int(patch_size) if float(patch_size).is_integer() else float(patch_size)
    columns = {name: _plain(np.asarray(column)) for name, column in values.items()}
    finite = {name: np.isfinite(np.asarray(column, dtype=float)).tolist() for name, column in values.items()}
    prefix = f"{slide_id}/"
    lines = []
    for index, (x, y) in enumerate(corners):
        ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
        feature = {
            "type": "Feature",
            "id": str(uuid.uuid5(NAMESPACE, f"{prefix}{index}")),
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {
                "objectType": "tile",
                "measurements": {name: column[index] for name, column in columns.items() if finite[name][index]},
            },
        }
        lines.append(json.dumps(feature, separators=(",", ":"), allow_nan=False))
    body = ",\n".join(lines)
    write_atomically(path, f'{{"type":"FeatureCollection","features":[\n{body}\n]}}\n')


def _plain(array: np.ndarray) -> list:
    """Plain Python numbers; float32 shown as short as it is, not as its double."""
    if array.dtype == np.float32:
        return [float(text) for text in array.astype(str).ravel()]
    return array.tolist()


def write_patch_table(
    path: str | Path, slide_id: str, coords: np.ndarray, patch_size: float, values: Mapping[str, np.ndarray]
) -> None:
    """One row per patch: slide_id, x, y, patch_size, and a column per value."""
    coords = np.asarray(coords)
    columns = {"slide_id": np.full(len(coords), slide_id), "x": coords[:, 0], "y": coords[:, 1]}
    columns["patch_size"] = np.full(len(coords), float(patch_size))
    table = pa.table({**columns, **{name: np.asarray(column) for name, column in values.items()}})
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    write_atomically(path, buffer.getvalue())
