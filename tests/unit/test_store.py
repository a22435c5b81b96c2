"""A bag is what was stored, with unit rows; a damaged or replaced cohort is noticed."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import write_tiny_cohort

from deco_ray.cohort import Cohort
from deco_ray.cohort.pages import Part, is_plain, plain_values
from deco_ray.cohort.schema import SLIDES, CohortMeta
from deco_ray.cohort.store import locate, shown
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.errors import CohortError
from deco_ray.keys import generator


def write(path, sizes=(5, 1, 700), dim=8, dtype="float32", coords=True, seed=0, part_bytes=2**20):
    meta = CohortMeta(name="t", classes=("a", "b"), dim=dim, dtype=dtype)
    slides = []
    with CohortWriter(path, meta, part_bytes) as writer:
        for index, n in enumerate(sizes):
            rng = generator(seed, "store test", index)
            features = rng.normal(0, 1, (n, dim)).astype(dtype)
            grid = rng.integers(-9, 10**6, (n, 2)) if coords else None
            slides.append(SlideFeatures(f"s{index}", "c", index % 2, features, grid))
            writer.add(slides[-1])
    return Cohort.open(path), slides


def oracle(features):
    """Eq. 1, row by row in double precision."""
    return np.stack([row / np.sqrt(sum(float(v) ** 2 for v in row)) for row in features.astype(np.float64)])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("coords", [True, False])
def test_a_bag_is_the_stored_slide_with_unit_rows(tmp_path, dtype, coords):
    cohort, slides = write(tmp_path / "c", dtype=dtype, coords=coords, part_bytes=100)
    assert cohort.slides["part"].nunique() > 1
    for slide, bag in zip(slides, cohort.bags(["s0", "s1", "s2"])):
        assert bag.features.dtype == torch.float32
        np.testing.assert_allclose(bag.features.numpy(), oracle(slide.features), rtol=0, atol=2e-7)
        assert bag.label == slide.label
        if coords:
            assert bag.coords.dtype == np.int64
            np.testing.assert_array_equal(bag.coords, slide.coords)
        else:
            assert bag.coords is None  # also for the slide of one patch


def test_a_bag_may_be_changed_without_changing_the_cohort(tmp_path):
    cohort, _ = write(tmp_path / "c")
    first = cohort.bag("s0")
    before = first.features.clone()
    first.features.zero_()
    assert torch.equal(cohort.bag("s0").features, before)


def test_our_parts_are_read_without_decoding(tmp_path):
    write(tmp_path / "c")
    file = pq.ParquetFile(tmp_path / "c" / "patches" / "part-00000.parquet")
    data = (tmp_path / "c" / "patches" / "part-00000.parquet").read_bytes()
    for group in range(3):
        rows = file.metadata.row_group(group).num_rows
        chunk = file.metadata.row_group(group).column(3)
        piece = memoryview(data)[chunk.data_page_offset : chunk.data_page_offset + chunk.total_compressed_size]
        expected = file.read_row_group(group)["feature"].combine_chunks().buffers()[1].to_pybytes()
        assert is_plain(chunk)
        assert bytes(plain_values(piece, rows, 32)) == expected


@pytest.mark.parametrize(
    "layout",
    [
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": True},
        {"compression": "none", "use_dictionary": False, "data_page_size": 1000, "write_batch_size": 10},
        {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
    ],
)
@pytest.mark.parametrize("coords", [True, False])
def test_parts_rewritten_by_other_tools_read_the_same(tmp_path, layout, coords):
    cohort, slides = write(tmp_path / "c", coords=coords)
    before = [cohort.bag(slide.slide_id) for slide in slides]
    path = tmp_path / "c" / "patches" / "part-00000.parquet"
    tables = [pq.ParquetFile(path).read_row_group(group) for group in range(3)]
    with pq.ParquetWriter(path, tables[0].schema, **layout) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=len(table))
    for bag in before:
        again = cohort.bag(bag.slide_id)
        assert torch.equal(again.features, bag.features)
        assert (again.coords is None) if bag.coords is None else np.array_equal(again.coords, bag.coords)


def test_a_replaced_cohort_is_noticed_by_the_same_process(tmp_path):
    cohort, _ = write(tmp_path / "c")
    cohort.bag("s0")
    shutil.rmtree(tmp_path / "c")
    _, slides = write(tmp_path / "c", seed=1)
    np.testing.assert_allclose(cohort.bag("s0").features.numpy(), oracle(slides[0].features), atol=2e-7)


@pytest.mark.parametrize("damage", ["truncated", "gone", "not parquet"])
def test_a_damaged_part_names_the_slide_and_the_file(tmp_path, damage):
    cohort, _ = write(tmp_path / "c")
    cohort.bag("s0")  # the footer is cached now
    path = tmp_path / "c" / "patches" / "part-00000.parquet"
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[: len(data) // 2] if damage == "truncated" else b"hello")
    with pytest.raises(CohortError, match=r"slide s2: cannot read .*part-00000.parquet, row group 2") as caught:
        cohort.bag("s2")
    assert "ingest it again" in str(caught.value)


def test_no_changed_byte_of_a_footer_ends_the_process(tmp_path):
    """pyarrow's metadata objects throw where nobody catches: such a footer must be refused before they are asked."""
    cohort, _ = write(tmp_path / "c")
    path = tmp_path / "c" / "patches" / "part-00000.parquet"
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for at in range(footer, len(whole)):
        path.unlink()  # never write into a file that is mapped
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            assert cohort.bag("s0").features.ndim == 2
        except CohortError as error:
            refused += "slide s0" in str(error)
    assert refused > 100


def test_slides_indexed_by_another_tool_read_the_same(tmp_path):
    cohort, _ = write(tmp_path / "c")
    path = tmp_path / "c" / "slides.parquet"
    pq.write_table(pa.Table.from_pandas(cohort.slides.set_index("row_group"), preserve_index=True), path)
    again = Cohort.open(tmp_path / "c")
    assert list(again.slides) == list(cohort.slides)
    assert torch.equal(again.bag("s2").features, cohort.bag("s2").features)
    pq.write_table(pa.Table.from_pandas(cohort.slides.drop(columns="row_group")), path)
    with pytest.raises(CohortError, match=r"cannot read .*slides.parquet.*row_group"):
        Cohort.open(tmp_path / "c")


def test_a_slide_id_that_is_no_text_is_refused_when_the_cohort_is_opened(tmp_path):
    write_tiny_cohort(tmp_path / "c")
    path = tmp_path / "c" / "slides.parquet"
    whole = path.read_bytes()
    assert b"s0_000" in whole
    path.write_bytes(whole.replace(b"s0_000", b"s0_0\xb40"))
    with pytest.raises(CohortError, match=r"cannot read .*slides.parquet.*ingest the cohort again"):
        Cohort.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["../../x", "s1", "s2"], "slide id '../../x'"),
        (["/etc/x", "s1", "s2"], "slide id '/etc/x'"),
        (["s1", "s1", "s2"], "slide s1 is listed twice"),
        ([None, "s1", "s2"], "a slide has no id"),
    ],
)
def test_slide_ids_of_a_received_cohort_are_checked_as_at_ingest(tmp_path, ids, message):
    cohort, _ = write(tmp_path / "c")
    table = pa.Table.from_pandas(cohort.slides.head(3).assign(slide_id=ids), preserve_index=False)
    pq.write_table(table, tmp_path / "c" / "slides.parquet")
    with pytest.raises(CohortError, match=f"cannot read .*slides.parquet: {message}"):
        Cohort.open(tmp_path / "c")


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("label", 2, "slide s1 cannot have the label 2"),
        ("label", -2, "slide s1 cannot have the label -2"),
        ("label", None, "slide s1 cannot have the label"),
        ("part", None, "slide s1 cannot have the part"),
        ("row_group", -1, "slide s1 cannot have the row_group -1"),
        ("n_patches", 0, "slide s1 cannot have the n_patches 0"),
    ],
)
def test_impossible_slides_are_refused_when_the_cohort_is_opened(tmp_path, column, value, message):
    write(tmp_path / "c")
    change_slides(tmp_path / "c", **{column: {1: value}})
    with pytest.raises(CohortError, match=message):
        Cohort.open(tmp_path / "c")


@pytest.mark.parametrize("column", ["case_id", "checksum", "label"])
def test_slides_of_another_type_are_refused(tmp_path, column):
    write(tmp_path / "c")
    path = tmp_path / "c" / "slides.parquet"
    table = pq.read_table(path)
    index = table.schema.get_field_index(column)
    pq.write_table(table.set_column(index, column, pa.array([b"\xff"] * len(table), pa.binary())), path)
    with pytest.raises(CohortError, match=r"cannot read .*slides.parquet.*ingest the cohort again"):
        Cohort.open(tmp_path / "c")


def change_slides(folder, **columns):
    """Write other values into slides.parquet: {column: {row: value}}."""
    path = folder / "slides.parquet"
    rows = pq.read_table(path).to_pylist()
    for name, values in columns.items():
        for row, value in values.items():
            rows[row][name] = value
    pq.write_table(pa.Table.from_pylist(rows, schema=SLIDES), path)


def test_what_is_changed_by_hand_is_another_cohort(tmp_path):
    """Else results of the old labels would be taken for those of the new ones."""
    before = write(tmp_path / "c")[0].checksum
    meta = json.loads((tmp_path / "c" / "cohort.json").read_text())
    assert meta["checksum"] == before
    (tmp_path / "c" / "cohort.json").write_text(json.dumps({**meta, "normal_class": 1}))
    other_normal = Cohort.open(tmp_path / "c").checksum
    change_slides(tmp_path / "c", label={1: 0})
    assert len({before, other_normal, Cohort.open(tmp_path / "c").checksum}) == 3


def test_features_that_are_not_those_of_the_ingest_are_noticed(tmp_path):
    cohort, _ = write(tmp_path / "c", sizes=(5, 5, 700))
    for slide in ("s0", "s1", "s2"):
        assert torch.equal(cohort.bag(slide, verify=True).features, cohort.bag(slide).features)
    change_slides(tmp_path / "c", row_group={0: 1, 1: 0})  # of equal size
    with pytest.raises(CohortError, match=r"slide s0: .*row group 1, does not hold what was ingested"):
        Cohort.open(tmp_path / "c").bag("s0", verify=True)
    change_slides(tmp_path / "c", row_group={0: 0, 1: 1}, n_patches={0: 3})
    with pytest.raises(CohortError, match=r"slide s0: .*does not hold what was ingested"):
        Cohort.open(tmp_path / "c").bag("s0")  # noticed without a checksum
    part = tmp_path / "c" / "patches" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1  # a bit of a feature of s2
    part.write_bytes(data)
    with pytest.raises(CohortError, match=r"slide s2: .*the cohort is damaged, ingest it again"):
        Cohort.open(tmp_path / "c").bag("s2", verify=True)


@pytest.mark.parametrize("stored", ["float32", "float16"])
def test_the_checksum_is_of_the_features_as_stored(tmp_path, stored):
    meta = CohortMeta(name="t", classes=("a",), dim=4, dtype=stored)
    with CohortWriter(tmp_path / "c", meta) as writer:
        writer.add(SlideFeatures("s", "c", 0, generator(0, "stored").normal(size=(6, 4))))  # float64
    Cohort.open(tmp_path / "c").bag("s", verify=True)


def test_a_part_without_the_columns_is_refused(tmp_path):
    cohort, _ = write(tmp_path / "c")
    path = tmp_path / "c" / "patches" / "part-00000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["feature"]), path)
    with pytest.raises(CohortError, match=r"slide s0.*no column feature"):
        cohort.bag("s0")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cohort.json", None, "no cohort at .*deco-ray ingest"),
        ("cohort.json", "{", "cohort.json is damaged"),
        ("cohort.json", "[" * 100_000, "cohort.json is damaged"),
        ("cohort.json", '{"dim": ' + "9" * 5000 + "}", "cohort.json is damaged"),
        ("cohort.json", '{"name": "x", "classes": ["a"], "dim": 4, "format_version": 99}', "cohort format 99"),
        ("cohort.json", '{"name": "x", "classes": ["a"], "dim": 4, "dtype": "int8"}', "neither float32 nor float16"),
        (
            "cohort.json",
            '{"name": "x", "classes": ["a"], "dim": 4, "normal_class": 7}',
            "normal_class 7 is none of its 1",
        ),
        ("slides.parquet", None, "cannot read .*slides.parquet"),
        ("slides.parquet", "x", "cannot read .*slides.parquet"),
    ],
)
def test_a_broken_cohort_does_not_open(tmp_path, name, content, message):
    write(tmp_path / "c")
    (tmp_path / "c" / name).unlink()
    if content is not None:
        (tmp_path / "c" / name).write_text(content)
    with pytest.raises(CohortError, match=message):
        Cohort.open(tmp_path / "c")


def test_unknown_slides_and_places_are_named(tmp_path):
    cohort, _ = write(tmp_path / "c")
    with pytest.raises(CohortError, match="slide 'zzz' is not in cohort t"):
        cohort.bag("zzz")
    with pytest.raises(CohortError, match="no cohort at"):
        Cohort.open(tmp_path / "none")
    with pytest.raises(CohortError, match="cannot open nonsense://x"):
        locate("nonsense://x")


def test_messages_keep_credentials_to_themselves():
    assert shown("s3://key:secret@bucket/cohort?endpoint_override=host&secret_key=x") == "s3://bucket/cohort"
    assert shown("s3://key:a/b@c d@bucket/cohort") == "s3://bucket/cohort"
    assert shown("/plain/path") == "/plain/path"
    with pytest.raises(CohortError) as caught:
        locate("nonsense://key:secret@x")
    assert "secret" not in str(caught.value)


def test_a_pickled_cohort_reads_the_same(tmp_path):
    cohort, _ = write(tmp_path / "c")
    cohort.bag("s0")
    again = pickle.loads(pickle.dumps(cohort))
    assert torch.equal(again.bag("s2").features, cohort.bag("s2").features)
    assert again.row("s2")["n_patches"] == 700


def test_opening_a_cohort_does_not_load_ray():
    code = "import sys, deco_ray.cohort; assert 'ray' not in sys.modules; from deco_ray.cohort import ingest; ingest"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parts_are_read_by_any_number_of_threads(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    cohort, _ = write(tmp_path / "c", sizes=range(1, 40))
    expected = {f"s{i}": cohort.bag(f"s{i}").features for i in range(39)}
    with ThreadPoolExecutor(4) as pool:
        for bag in pool.map(cohort.bag, list(expected) * 3):
            assert torch.equal(bag.features, expected[bag.slide_id])


def test_a_failed_write_leaves_nothing(tmp_path):
    def attempt():
        with CohortWriter(tmp_path / "c", CohortMeta(name="t", classes=("a",), dim=2)) as writer:
            for slide in ("ok", "../evil"):
                writer.add(SlideFeatures(slide, "c", 0, np.ones((2, 2), np.float32)))

    with pytest.raises(CohortError, match="path separator"):
        attempt()
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "c")
    with pytest.raises(CohortError, match="exists already"):
        write(tmp_path / "c")


def test_the_checksum_is_of_the_data_not_of_name_or_place(tmp_path):
    first, _ = write(tmp_path / "a")
    second, _ = write(tmp_path / "b", part_bytes=10)
    other, _ = write(tmp_path / "d", seed=1)
    assert first.checksum == second.checksum != other.checksum
    assert json.loads((tmp_path / "a" / "cohort.json").read_text())["checksum"] == first.checksum


def test_part_reads_a_file_that_is_not_mapped(tmp_path):
    write(tmp_path / "c")
    with open(tmp_path / "c" / "patches" / "part-00000.parquet", "rb") as file:
        features, coords = Part(pa.PythonFile(file)).patches(2, 8, "float32")
    assert len(features) == len(coords) == 700
