"""GeoJSON that QuPath opens: structure, one feature per patch, values that survive; the Parquet beside it."""

from __future__ import annotations

import json
import uuid

import numpy as np
import pyarrow.parquet as pq

from deco_ray.keys import generator
from deco_ray.results.geojson import write_geojson, write_patch_table
from deco_ray.results.lesions import read_lesions


def refuse(constant):
    raise ValueError(constant)


def check_structure(tree) -> None:
    """RFC 7946: members of a FeatureCollection, closed rings of at least four positions, exterior counterclockwise."""
    assert set(tree) == {"type", "features"}
    assert tree["type"] == "FeatureCollection"
    for feature in tree["features"]:
        assert feature["type"] == "Feature"
        assert isinstance(feature["properties"], dict)
        geometry = feature["geometry"]
        assert geometry["type"] == "Polygon"
        for ring in geometry["coordinates"]:
            assert len(ring) >= 4
            assert ring[0] == ring[-1]
            assert all(len(point) == 2 and all(isinstance(v, (int, float)) for v in point) for point in ring)
            x, y = np.array(ring, dtype=float).T
            assert (x[:-1] * y[1:] - x[1:] * y[:-1]).sum() > 0


def patches(n=50):
    rng = generator(0, "geojson test")
    coords = np.stack([np.arange(n) % 10, np.arange(n) // 10], 1) * 256
    values = {
        "anchor": rng.integers(0, 64, n),
        "contribution": rng.normal(size=n).astype(np.float32),
        "attention": rng.random(n),
    }
    values["contribution"][3] = np.nan
    return coords, values


def test_one_valid_tile_per_patch_with_its_values(tmp_path):
    coords, values = patches()
    write_geojson(tmp_path / "s.geojson", 'a"<b>', coords, 256.0, values)
    tree = json.loads((tmp_path / "s.geojson").read_text(), parse_constant=refuse)
    check_structure(tree)
    assert len(tree["features"]) == 50
    assert len({uuid.UUID(feature["id"]) for feature in tree["features"]}) == 50
    for index, feature in enumerate(tree["features"]):
        assert feature["properties"]["objectType"] == "tile"
        assert feature["geometry"]["coordinates"][0][0] == coords[index].tolist()
        assert feature["geometry"]["coordinates"][0][2] == (coords[index] + 256).tolist()
        measured = feature["properties"]["measurements"]
        assert measured["anchor"] == values["anchor"][index]
        assert ("contribution" in measured) == (index != 3)
        if index != 3:
            assert np.float32(measured["contribution"]) == values["contribution"][index]
        assert measured["attention"] == values["attention"][index]


def test_our_own_reader_opens_it(tmp_path):
    coords, values = patches(7)
    write_geojson(tmp_path / "s.geojson", "s", coords, 100.5, values)
    assert len(read_lesions(tmp_path / "s.geojson")) == 7


def test_parquet_has_a_row_per_patch(tmp_path):
    coords, values = patches()
    write_patch_table(tmp_path / "s.parquet", "s", coords, 256.0, values)
    frame = pq.read_table(tmp_path / "s.parquet").to_pandas()
    assert list(frame) == ["slide_id", "x", "y", "patch_size", "anchor", "contribution", "attention"]
    np.testing.assert_array_equal(frame[["x", "y"]], coords)
    np.testing.assert_array_equal(frame["contribution"].to_numpy(), values["contribution"])
