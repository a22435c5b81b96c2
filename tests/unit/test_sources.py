"""The files are found where each tool puts them."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest

from deco_ray.cohort.labels import check_files
from deco_ray.cohort.sources import discover
from deco_ray.errors import CohortError


def touch(path, key="features", **attrs):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file[key], file["coords"] = np.ones((2, 3)), np.zeros((2, 2))
            file["coords"].attrs.update(attrs)
    else:
        path.write_bytes(b"")


def found(root, *arguments):
    folder = discover(root, *arguments)
    return folder.format, [str(file.path.relative_to(root)) for file in folder.files]


def test_clam_prefers_h5_files(tmp_path):
    for name in ("h5_files/b.h5", "h5_files/a.h5", "pt_files/a.pt", "patches/a.h5"):
        touch(tmp_path / name)
    assert found(tmp_path) == ("clam", ["h5_files/a.h5", "h5_files/b.h5"])
    assert found(tmp_path, "pt") == ("pt", ["pt_files/a.pt"])


def test_trident_is_found_below_its_job_folder(tmp_path):
    touch(tmp_path / "20x_256px_0px_overlap/features_uni/a.h5", patch_size_level0=512)
    touch(tmp_path / "20x_256px_0px_overlap/slide_features_titan/a.h5")
    assert found(tmp_path)[0] == "trident"
    assert discover(tmp_path).encoder == "uni"
    touch(tmp_path / "20x_256px_0px_overlap/features_conch/a.h5", patch_size_level0=512)
    with pytest.raises(CohortError, match=r"several sets of features .*features_conch.*features_uni"):
        discover(tmp_path)
    assert discover(tmp_path, "auto", "conch").encoder == "conch"


def test_stamp_npy_and_folders_by_class(tmp_path):
    touch(tmp_path / "stamp/a.h5", "feats")
    touch(tmp_path / "npy/a.npy")
    touch(tmp_path / "classes/x/b.pt")
    touch(tmp_path / "classes/y/a.pt")
    assert found(tmp_path / "stamp") == ("stamp", ["a.h5"])
    assert found(tmp_path / "npy") == ("npy", ["a.npy"])
    assert found(tmp_path / "classes") == ("pt", ["y/a.pt", "x/b.pt"])


def test_the_format_is_told_from_the_first_file_that_opens(tmp_path):
    """Damage shows where HDF5 stumbles over it, not only on opening: here in the tree of names, a RuntimeError."""
    for name in ("a", "b"):
        touch(tmp_path / f"{name}.h5", patch_size_level0=512)
    data = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "a.h5").write_bytes(data.replace(b"TREE", b"TRXX").replace(b"HEAP", b"HEXX"))
    with h5py.File(tmp_path / "a.h5") as file, pytest.raises(RuntimeError):
        "feats" in file  # noqa: B015
    assert found(tmp_path) == ("trident", ["a.h5", "b.h5"])


def test_a_name_that_is_not_utf_8_is_given_in_words_that_can_be_written(tmp_path):
    touch(tmp_path / os.fsdecode(b"x\xff/features_\xfe/a\xff.pt"))
    folder = discover(tmp_path / os.fsdecode(b"x\xff"))
    assert folder.names == [(r"a\udcff", r"features_\udcfe/a\udcff.pt")]
    assert folder.encoder == r"\udcfe"
    assert folder.files[0].path.is_file()
    (problem,) = check_files(folder.names)
    assert "bytes that are not UTF-8; rename the slide" in problem.reason
    str(problem).encode()


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(CohortError, match="no folder"):
        discover(tmp_path / "none")
    with pytest.raises(CohortError, match="no feature files"):
        discover(tmp_path)
    with pytest.raises(CohortError, match="unknown format 'zarr'"):
        discover(tmp_path, "zarr")
