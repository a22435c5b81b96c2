"""Damaged and hostile feature files, annotations and cohorts: refused with a reason or read correctly, nothing else."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile

import h5py
import numpy as np
import pytest
import torch
from fuzzing import damage, damaged, fuzz, speaks
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from deco_ray.cohort.readers import READERS, Unreadable
from deco_ray.cohort.schema import check_slide_id
from deco_ray.cohort.sources import discover
from deco_ray.cohort.splits import load_split, make_split, save_split
from deco_ray.cohort.store import Cohort
from deco_ray.config import SplitSection
from deco_ray.errors import CohortError, DecoError
from deco_ray.results.lesions import read_lesions


def rows(n: int = 6, d: int = 4) -> np.ndarray:
    return np.arange(1, n * d + 1, dtype=np.float32).reshape(n, d)


def h5_bytes(name: str, **attributes) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file[name] = rows()
        file["coords"] = np.arange(12).reshape(6, 2) * 256
        for key, value in attributes.items():
            file["coords"].attrs[key] = value
            file.attrs[key] = value
    return buffer.getvalue()


def pt_bytes(content, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def npy_bytes() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, rows())
    return buffer.getvalue()


FILES = {
    "clam": ("clam", h5_bytes("features")),
    "trident": ("trident", h5_bytes("features", patch_size_level0=512, level0_width=4096, level0_height="None")),
    "stamp": ("stamp", h5_bytes("feats", unit="um", tile_size_um=256.0, tile_size_px=224)),
    "tensor": ("pt", pt_bytes(torch.from_numpy(rows()))),
    "old tensor": ("pt", pt_bytes(torch.from_numpy(rows()), _use_new_zipfile_serialization=False)),
    "dictionary": ("pt", pt_bytes({"features": torch.from_numpy(rows()), "coords": torch.zeros(6, 2)})),
    "pickled array": ("pt", pickle.dumps(rows())),
    "array in a zip": ("pt", pt_bytes(rows())),
    "npy": ("npy", npy_bytes()),
}


@pytest.mark.parametrize("name", FILES)
def test_feature_files(name, tmp_path):
    format, whole = FILES[name]
    path = tmp_path / f"slide{'.npy' if format == 'npy' else '.pt' if format == 'pt' else '.h5'}"

    @fuzz
    @given(damage)
    def check(changes):
        data = damaged(whole, changes)
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                slide = READERS[format](path)
            except Unreadable as error:
                speaks(error)
                return
            finally:
                assert len(discover(tmp_path).files) == 1  # before any file is read, and damaged ones are in the folder
        assert slide.features.ndim == 2
        assert slide.features.dtype in (np.float32, np.float16)
        assert slide.coords is None or slide.coords.shape == (len(slide.features), 2)
        if data == whole:
            assert np.array_equal(slide.features, rows())

    check()


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def hostile_files(trap) -> dict[str, tuple[str, bytes]]:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Payload(trap)))
        file.writestr("archive/version", "3")
    objects = io.BytesIO()
    np.save(objects, np.array([Payload(trap)], dtype=object), allow_pickle=True)
    inside = rows().astype(object)
    inside[0, 0] = Payload(trap)
    return {
        "bare": ("pt", pickle.dumps(Payload(trap))),
        "protocol 0": ("pt", pickle.dumps(Payload(trap), 0)),
        "zip": ("pt", archive.getvalue()),
        "in a dictionary": ("pt", pt_bytes({"features": torch.ones(2, 2), "x": Payload(trap)})),
        "old stream": ("pt", pt_bytes(Payload(trap), _use_new_zipfile_serialization=False)),
        "object array": ("pt", pickle.dumps(inside)),
        "npy": ("npy", objects.getvalue()),
    }


@pytest.mark.parametrize("name", hostile_files("x"))
def test_no_code_in_a_feature_file_is_run(name, tmp_path):
    trap = tmp_path / "executed"
    format, data = hostile_files(trap)[name]
    path = tmp_path / f"slide.{format}"
    path.write_bytes(data)
    with pytest.raises(Unreadable):
        READERS[format](path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Payload(trap))).close()
    assert trap.exists()  # the payload does work where pickles are loaded


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    from conftest import write_tiny_cohort

    root = tmp_path_factory.mktemp("fuzz") / "cohort"
    cohort = write_tiny_cohort(root, slides=(6, 6), dim=4, patches=(3, 6))
    save_split(cohort, make_split(cohort, SplitSection(val_per_class=1, test_per_class=1)))
    return root


@pytest.mark.parametrize("name", ["cohort.json", "slides.parquet", "patches/part-00000.parquet", "splits"])
def test_cohorts(name, stored, tmp_path):
    root = tmp_path / "cohort"
    shutil.copytree(stored, root)
    path = root / name if name != "splits" else next((root / "splits").iterdir())
    split = next((root / "splits").iterdir()).stem
    whole, calm = path.read_bytes(), Cohort.open(stored)

    @fuzz
    @given(damage)
    def check(changes):
        data = damaged(whole, changes)
        path.write_bytes(data)
        try:
            cohort = Cohort.open(root)
            load_split(cohort, split).ids("train")
            bags = [cohort.bag(slide) for slide in cohort.slides["slide_id"]]
        except DecoError as error:
            speaks(error)
            return
        assert all(bag.features.ndim == 2 for bag in bags)
        if data == whole:
            assert all(torch.equal(bag.features, calm.bag(bag.slide_id).features) for bag in bags)

    check()


SQUARE = [[0, 0], [100, 0], [100, 100], [0, 100], [0, 0]]
GEOJSON = {
    "type": "FeatureCollection",
    "features": [
        {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [SQUARE]}},
        {"type": "Feature", "geometry": {"type": "MultiPolygon", "coordinates": [[SQUARE], [SQUARE]]}},
    ],
}
POINTS = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y},5"/>' for i, (x, y) in enumerate(SQUARE[:4]))
XML = f"<A><Annotation PartOfGroup='Tumor'><Coordinates>{POINTS}</Coordinates></Annotation></A>"
leaves = (
    st.none() | st.booleans() | st.floats() | st.text(max_size=4) | st.sampled_from(["Polygon", "Feature", "Point"])
)
keys = st.sampled_from(["type", "features", "geometry", "coordinates", "geometries", "properties"])
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner), max_leaves=12)


def png_bytes(mode: str = "L") -> bytes:
    buffer = io.BytesIO()
    mask = np.zeros((12, 12), np.uint8)
    mask[3:8, 4:9] = 1
    Image.fromarray(mask).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


ANNOTATIONS = {".geojson": json.dumps(GEOJSON).encode(), ".xml": XML.encode(), ".png": png_bytes()}


@pytest.mark.parametrize("ending", ANNOTATIONS)
def test_annotations(ending, tmp_path):
    path = tmp_path / f"slide{ending}"
    whole = ANNOTATIONS[ending]

    @fuzz
    @given(damage)
    def check(changes):
        data = damaged(whole, changes)
        path.write_bytes(data)
        try:
            lesions = read_lesions(path, level0=(1200, 1200))
        except DecoError as error:
            speaks(error, str(path))
            return
        assert all(lesion.points.ndim == 2 and lesion.points.shape[1] == 2 for lesion in lesions)
        assert lesions or data != whole

    check()


def test_any_json_as_an_annotation(tmp_path):
    path = tmp_path / "slide.json"

    @fuzz
    @given(trees)
    def check(tree):
        path.write_text(json.dumps(tree))
        try:
            lesions = read_lesions(path)
        except DecoError as error:
            speaks(error, str(path))
            return
        assert all(np.isfinite(lesion.points).all() for lesion in lesions)

    check()


@fuzz
@given(st.text(max_size=220) | st.sampled_from(["..", "a/../b", "C:\\x", "/etc/passwd", "a\x00b", ".", "~", "a\nb"]))
def test_a_slide_id_that_passes_stays_in_its_folder(slide):
    try:
        check_slide_id(slide)
    except CohortError:
        return
    inside = os.path.normpath(os.path.join("/out/folder", f"{slide}.png"))
    assert os.path.dirname(inside) == "/out/folder"
