"""Every format as its tool writes it, and every way a file can be wrong; nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
import zipfile

import h5py
import numpy as np
import pytest
import torch

from deco_ray.cohort.readers import READERS, Unreadable
from deco_ray.cohort.readers.raw import check_values
from deco_ray.keys import generator


def bag(n=6, dim=4, dtype=np.float32):
    return generator(0, "reader test", n).normal(1, 1, (n, dim)).astype(dtype)


def write_h5(path, attrs=None, on="coords", **arrays):
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        for name, value in (attrs or {}).items():
            (file if on == "file" else file[on]).attrs[name] = value
    return path


GRID = np.stack([np.arange(6) * 512, np.arange(6) * 256], 1)


def test_clam_reads_geometry_from_the_sibling_folder(tmp_path):
    features = bag()
    path = write_h5(tmp_path / "h5_files" / "a.h5", features=features, coords=GRID.astype(np.int32))
    assert READERS["clam"](path).patch_size_level0 is None
    attrs = {"patch_size": 256, "patch_level": 1, "downsample": (4.0, 4.0), "level_dim": (1000, 500)}
    write_h5(tmp_path / "patches" / "a.h5", attrs, coords=GRID)
    slide = READERS["clam"](path)
    np.testing.assert_array_equal(slide.features, features)
    np.testing.assert_array_equal(slide.coords, GRID)
    assert (slide.patch_size_level0, slide.level0_width, slide.level0_height) == (1024.0, 4000, 2000)


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -4.0, np.zeros(0), h5py.Empty("f8")])
def test_clam_geometry_that_is_no_size_counts_as_absent(tmp_path, value):
    path = write_h5(tmp_path / "h5_files" / "a.h5", features=bag(), coords=GRID)
    whole = {"patch_size": 256, "downsample": (4.0, 4.0), "level_dim": (1000, 500)}
    for name, left in [
        ("patch_size", (None, 4000, 2000)),
        ("downsample", (None, None, None)),
        ("level_dim", (1024.0, None, None)),
    ]:
        write_h5(tmp_path / "patches" / "a.h5", {**whole, name: value}, coords=GRID)
        slide = READERS["clam"](path)
        assert (slide.patch_size_level0, slide.level0_width, slide.level0_height) == left


def test_clam_sizes_that_no_slide_has_count_as_absent(tmp_path):
    path = write_h5(tmp_path / "h5_files" / "a.h5", features=bag(), coords=GRID)
    attrs = {"patch_size": 1e300, "downsample": 2e9, "level_dim": (1e300, 4.0)}
    write_h5(tmp_path / "patches" / "a.h5", attrs, coords=GRID)
    slide = READERS["clam"](path)
    assert (slide.patch_size_level0, slide.level0_width, slide.level0_height) == (None, None, None)


@pytest.mark.parametrize("value", [1e30, 2**31, 0.2, np.inf])
def test_a_slide_wider_than_a_coordinate_can_be_has_no_known_width(tmp_path, value):
    attrs = {"patch_size_level0": 512, "level0_width": value, "level0_height": 2**31 - 1}
    slide = READERS["trident"](write_h5(tmp_path / "a.h5", attrs, features=bag(), coords=GRID))
    assert (slide.level0_width, slide.level0_height) == (None, 2**31 - 1)


def borrow(path, how: str) -> None:
    """An h5 whose features lie in another file, in each way HDF5 knows."""
    other = write_h5(path.parent / "other" / "o.h5", features=bag(), coords=GRID)
    with h5py.File(path, "w") as file:
        file["coords"] = GRID
        if how == "external link":
            file["features"] = h5py.ExternalLink(str(other), "features")
        elif how == "soft link to an external one":
            file["group"] = h5py.ExternalLink(str(other), "/")
            file["features"] = h5py.SoftLink("/group/features")
        elif how == "external storage":
            (path.parent / "raw").write_bytes(bag().tobytes())
            file.create_dataset("features", (6, 4), "f4", external=[(str(path.parent / "raw"), 0, h5py.h5f.UNLIMITED)])
        else:
            layout = h5py.VirtualLayout((6, 4), "f4")
            layout[:] = h5py.VirtualSource(str(other), "features", (6, 4))
            file.create_virtual_dataset("features", layout)


@pytest.mark.parametrize("how", ["external link", "soft link to an external one", "external storage", "virtual"])
def test_h5_must_hold_its_own_data(tmp_path, how):
    borrow(tmp_path / "a.h5", how)
    with h5py.File(tmp_path / "a.h5") as file:
        np.testing.assert_array_equal(file["features"], bag())  # HDF5 itself would have read the other file
    for format in ("clam", "trident", "stamp"):
        with pytest.raises(Unreadable, match="features lies in another file; a feature file must hold its own data"):
            READERS[format](tmp_path / "a.h5")


def test_h5_links_within_the_file_are_followed(tmp_path):
    path = write_h5(tmp_path / "a.h5", data=bag(), coords=GRID)
    with h5py.File(path, "r+") as file:
        file["features"] = h5py.SoftLink("/data")
    np.testing.assert_array_equal(READERS["clam"](path).features, bag())


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_trident_keeps_float16_rounds_coords_and_takes_missing_attributes(tmp_path, dtype):
    attrs = {"patch_size_level0": 511.7, "level0_width": "None"}
    path = write_h5(tmp_path / "a.h5", attrs, features=bag(dtype=dtype), coords=GRID + 0.4)
    slide = READERS["trident"](path)
    assert slide.features.dtype == dtype
    np.testing.assert_array_equal(slide.coords, GRID)
    assert slide.patch_size_level0 == pytest.approx(511.7)
    assert slide.level0_width is None
    assert slide.level0_height is None


def test_a_leading_batch_axis_is_dropped(tmp_path):
    features = bag()
    slide = READERS["trident"](write_h5(tmp_path / "a.h5", features=features[None], coords=GRID[None]))
    np.testing.assert_array_equal(slide.features, features)
    assert slide.coords.shape == (6, 2)


@pytest.mark.parametrize(
    ("attrs", "unit_px", "size"),
    [
        ({"tile_size_um": 256.0, "tile_size_px": 224}, 224 / 256, 224),
        ({"tile_size": 256.0, "unit": "um"}, 224 / 256, 224),
        ({"tile_size_px": 300, "unit": "px"}, 1.0, 300),
        ({}, 1.0, 256),  # the stride of the coordinates
    ],
)
def test_stamp_turns_microns_into_pixels(tmp_path, attrs, unit_px, size):
    path = write_h5(tmp_path / "a.h5", attrs, "file", feats=bag(), coords=GRID.astype(float))
    slide = READERS["stamp"](path)
    np.testing.assert_array_equal(slide.coords, np.rint(GRID * unit_px))
    assert slide.patch_size_level0 == size


def test_stamp_refuses_an_unknown_unit(tmp_path):
    path = write_h5(tmp_path / "a.h5", {"unit": "inch"}, "file", feats=bag(), coords=GRID)
    with pytest.raises(Unreadable, match="unit 'inch'"):
        READERS["stamp"](path)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "array", "dictionary"])
def test_pt_tensors_arrays_and_dictionaries(tmp_path, kind, old):
    features = bag()
    content = {"tensor": torch.from_numpy(features), "array": features, "dictionary": {"features": features}}[kind]
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    np.testing.assert_array_equal(READERS["pt"](tmp_path / "a.pt").features, features)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pt_that_is_a_bare_pickle_of_an_array(tmp_path, protocol):
    features = bag(dtype=np.float16)
    (tmp_path / "a.pt").write_bytes(pickle.dumps(features, protocol=protocol))
    np.testing.assert_array_equal(READERS["pt"](tmp_path / "a.pt").features, features)


def test_pickles_of_numpy_1_name_its_old_module(tmp_path):
    features = bag()
    data = pickle.dumps(features, protocol=2)
    assert b"numpy._core" in data
    (tmp_path / "a.pt").write_bytes(data.replace(b"numpy._core", b"numpy.core"))
    np.testing.assert_array_equal(READERS["pt"](tmp_path / "a.pt").features, features)


class Malicious:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("how", ["torch", "torch old", "pickle", "inside an array", "beside features"])
def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path, how):
    mark = str(tmp_path / "was run")
    content: object = Malicious(mark)
    if how == "inside an array":
        content = np.array([content], dtype=object)
    if how == "beside features":
        content = {"features": bag(), "extra": content}
    if how == "pickle":
        (tmp_path / "a.pt").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=how != "torch old")
    with pytest.raises(Unreadable, match="pickle can run code"):
        READERS["pt"](tmp_path / "a.pt")
    assert not os.path.exists(mark)
    pickle.loads(pickle.dumps(Malicious(mark)))  # the trap is armed: an ordinary reader would have run it
    assert os.path.exists(mark)


def test_npy_is_read_and_an_array_of_objects_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", bag().astype(np.float64))
    assert READERS["npy"](tmp_path / "a.npy").features.dtype == np.float32
    np.save(tmp_path / "b.npy", np.array([Malicious(str(tmp_path / "x"))], dtype=object), allow_pickle=True)
    with pytest.raises(Unreadable, match="not a plain"):
        READERS["npy"](tmp_path / "b.npy")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("features", "coords", "message"),
    [
        (np.zeros((0, 4), np.float32), np.zeros((0, 2)), "empty bag"),
        (np.zeros(0, np.float32), np.zeros((0, 2)), "empty bag"),
        (np.ones(4, np.float32), GRID, "slide-level feature"),
        (np.ones((2, 3, 4), np.float32), GRID, r"shape \(2, 3, 4\)"),
        (np.ones((6, 4), np.int32), GRID, "int32"),
        (np.ones((6, 4), np.float32), GRID[:5], "6 features but 5 coords"),
        (np.ones((6, 4), np.float32), np.full((6, 2), np.nan), "coords are not finite"),
        (np.ones((6, 4), np.float32), np.zeros((6, 3)), r"coords have shape \(6, 3\)"),
    ],
)
def test_h5_that_is_no_bag_is_refused(tmp_path, features, coords, message):
    path = write_h5(tmp_path / "a.h5", features=features, coords=coords)
    for format in ("clam", "trident"):
        with pytest.raises(Unreadable, match=message):
            READERS[format](path)


@pytest.mark.parametrize("format", ["clam", "trident", "stamp", "pt", "npy"])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_damaged_files_are_refused(tmp_path, format, damage):
    path = tmp_path / "a"
    if format == "pt":
        torch.save(torch.from_numpy(bag(600)), path)
    elif format == "npy":
        with open(path, "wb") as file:
            np.save(file, bag(600))
    else:
        write_h5(path, **{"feats" if format == "stamp" else "features": bag(600), "coords": np.zeros((600, 2))})
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"hello there", "empty": b""}[damage])
    with pytest.raises(Unreadable, match="truncated or not"):
        READERS[format](path)


def test_h5_without_features_says_what_it_holds(tmp_path):
    with pytest.raises(Unreadable, match=r"no dataset features.*holds coords"):
        READERS["trident"](write_h5(tmp_path / "a.h5", coords=GRID))


@pytest.mark.parametrize("in_torch", [False, True])
def test_a_damaged_byte_order_of_a_pickled_array_is_refused(tmp_path, in_torch):
    """NumPy's own unpickling takes any byte for an order, and crashes on using it."""
    path = tmp_path / "s.pt"
    if in_torch:
        torch.save(bag(), path)
    else:
        path.write_bytes(pickle.dumps(bag(), 2))
    order = b"X\x01\x00\x00\x00<"
    whole = path.read_bytes()
    assert whole.count(order) == 1
    path.write_bytes(whole.replace(order, order[:-1] + b"N"))
    with pytest.raises(Unreadable, match=r"is damaged"):
        READERS["pt"](path)


def test_a_pickle_cannot_change_how_the_next_one_is_read(tmp_path):
    """A state may be given to any object on pickle's stack, a class of ours included."""
    path = tmp_path / "s.pt"
    path.write_bytes(b"\x80\x02cnumpy\ndtype\nN}X\x05\x00\x00\x00foundK\x01s\x86b.")
    with pytest.raises(Unreadable):
        READERS["pt"](path)
    path.write_bytes(pickle.dumps(bag()))
    assert np.array_equal(READERS["pt"](path).features, bag())


def test_an_h5_whose_names_are_damaged_is_refused_in_words_that_print(tmp_path):
    path = tmp_path / "s.h5"
    write_h5(path, features=bag())
    path.write_bytes(path.read_bytes().replace(b"features", b"feat\xffres"))
    with pytest.raises(Unreadable, match="no dataset features") as refusal:
        READERS["clam"](path)
    str(refusal.value).encode()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value):
    features = bag()
    features[3, 1] = value
    with pytest.raises(Unreadable, match="NaN or Inf in 1 of 6 patches, first in patch 3"):
        check_values(features)


def test_all_zero_patches_are_refused():
    features = bag()
    check_values(features)
    features[[2, 4]] = 0
    with pytest.raises(Unreadable, match="2 of 6 patches are all zero, first patch 2"):
        check_values(features)


def test_damaged_texts_are_refused_before_hdf5_goes_round_in_them_for_ever(tmp_path):
    """Free space of no size in the heap of texts: HDF5 never gets past it. Readers that need no text do not look."""
    path = write_h5(tmp_path / "a.h5", {"unit": "um", "tile_size_um": 256.0}, "file", feats=bag(), coords=GRID)
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    free = heap + 16 + 16 + 8  # behind the heap's header and its one text of up to eight bytes
    assert data[free : free + 2] == b"\0\0"
    data[free + 8 : free + 16] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(Unreadable, match="its texts are damaged"):
        READERS["stamp"](path)
    np.testing.assert_array_equal(READERS["clam"](path).features, bag())


def test_h5_with_anything_but_numbers_is_not_read(tmp_path):
    """Data of variable length can crash HDF5 itself; as an attribute it is passed over, as features refused."""
    path = write_h5(tmp_path / "a.h5", {"patch_size_level0": 512, "notes": "x"}, features=bag(), coords=GRID)
    lengthy = np.empty(1, object)
    lengthy[0] = np.arange(3)
    with h5py.File(path, "r+") as file:
        file["coords"].attrs.create("level0_width", lengthy, dtype=h5py.vlen_dtype(np.int64))
    slide = READERS["trident"](path)
    assert (slide.patch_size_level0, slide.level0_width) == (512.0, None)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("features", (3,), h5py.vlen_dtype(np.float32))
    with pytest.raises(Unreadable, match="the dataset features does not hold numbers"):
        READERS["trident"](tmp_path / "b.h5")


@pytest.mark.parametrize(
    "hostile",
    [
        b"\x80\x02Nr" + struct.pack("<I", 2**24) + b".",
        b"\x80\x02Np16777216\n.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**27) + b".",
        b"\x80\x02" + 1000 * b"N0" + b"N.",
    ],
    ids=["place", "place in digits", "length", "steps"],
)
def test_a_pickle_gets_no_room_for_what_it_only_states(tmp_path, hostile, monkeypatch):
    """The unpickler would take 128 MB for each of the first three; larger numbers would take any machine's memory."""
    (tmp_path / "a.pt").write_bytes(hostile)
    monkeypatch.setattr("deco_ray.cohort.readers.pickled_array._Unpickler", None)  # it must not get that far
    with pytest.raises(Unreadable, match=r"(more steps than an array has|expected 134217728 bytes).*bare tensor"):
        READERS["pt"](tmp_path / "a.pt")


@pytest.mark.parametrize("written", [0, 1])
def test_an_h5_dataset_that_was_not_written_is_refused(tmp_path, written):
    """HDF5 would fill it with 400 MB of ones."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("features", (10**5, 1024), "f4", chunks=(10, 1024), fillvalue=1)[:written] = 2
        file["coords"] = np.zeros((10**5, 2), np.int32)
    for format in ("clam", "trident", "stamp"):
        with pytest.raises(Unreadable, match=r"the dataset features of shape \(100000, 1024\) was not written.*again"):
            READERS[format](tmp_path / "a.h5")


def test_a_small_h5_dataset_that_was_not_written_is_refused_too(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["features"] = bag()
        file.create_dataset("coords", (6, 2), "i4")
    with pytest.raises(Unreadable, match=r"the dataset coords .* holds 0 bytes of its 48; extract the slide again"):
        READERS["clam"](tmp_path / "a.h5")


@pytest.mark.parametrize("name", ["features", "coords"])
def test_an_h5_dataset_without_a_shape_is_refused(tmp_path, name):
    path = write_h5(tmp_path / "a.h5", **({"features": bag(), "coords": GRID} | {name: h5py.Empty("f4")}))
    with pytest.raises(Unreadable, match=f"the dataset {name} holds nothing"):
        READERS["clam"](path)


def test_h5_features_that_compress_well_are_read(tmp_path):
    sparse = np.zeros((20_000, 1024), np.float32)
    sparse[:, ::50] = generator(0, "sparse").normal(size=(20_000, 21))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("features", data=sparse, chunks=(1000, 1024), compression="gzip", shuffle=True)
        assert file["features"].id.get_storage_size() * 10 < sparse.nbytes
    np.testing.assert_array_equal(READERS["clam"](tmp_path / "a.h5").features, sparse)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_larger_than_its_file_is_refused(tmp_path, dtype, old):
    rows = torch.ones(1, 1, dtype=dtype).expand(3_000_000, 1024)
    for content in (rows, {"features": torch.ones(6, 4), "coords": rows}):
        torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        with pytest.raises(Unreadable, match=r"a tensor of shape \(3000000, 1024\).* in a file of .*clone"):
            READERS["pt"](tmp_path / "a.pt")


@pytest.mark.parametrize("how", ["archive", "old stream", "packed"])
def test_a_torch_file_gets_no_room_for_what_it_only_states(tmp_path, how):
    """torch's own unpickler would make a gigabyte of zeros, or unpack a pickle of any size."""
    path = tmp_path / "a.pt"
    torch.save(torch.ones(6, 4), path, _use_new_zipfile_serialization=how != "old stream")
    zeros = b"\x80\x02c__builtin__\nbytearray\nJ" + (10**9).to_bytes(4, "little") + b"\x85R."
    if how == "old stream":
        path.write_bytes(path.read_bytes()[:14] + zeros)
    else:
        with zipfile.ZipFile(path) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in held.items():
                described = zeros if how == "archive" else bytes(2**25)
                archive.writestr(name, described if name.endswith("data.pkl") else content)
    tracemalloc.start()
    with pytest.raises(Unreadable, match="holds more than arrays"):
        READERS["pt"](path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_part_of_a_larger_tensor_is_read(tmp_path):
    torch.save(torch.from_numpy(bag(60))[::2], tmp_path / "a.pt")
    np.testing.assert_array_equal(READERS["pt"](tmp_path / "a.pt").features, bag(60)[::2])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "of no device", "nested", "eight bits"])
def test_a_tensor_that_numpy_has_no_array_for_is_refused(tmp_path, kind):
    content = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "of no device": lambda: torch.empty(6, 4, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)]),
        "eight bits": lambda: torch.ones(6, 4).to(torch.float8_e4m3fn),
    }[kind]()
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(Unreadable, match=r"no plain array.*save it dense"):
        READERS["pt"](tmp_path / "a.pt")
