"""A part depends on its files only, is written whole or not at all, and is not written twice."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

from deco_ray.cohort import parts
from deco_ray.cohort.parts import PartPlan, Shape, first_shape, plan_parts, settled_shape, write_part
from deco_ray.cohort.sources import Source, discover
from deco_ray.errors import CohortError


def folder(path, dims=(4, 4, 4), dtype=np.float32):
    path.mkdir(exist_ok=True)
    for index, dim in enumerate(dims):
        np.save(path / f"s{index}.npy", np.full((3 + index, dim), index + 1, dtype))
    return discover(path).files


def test_shares_are_even_in_order_and_bounded():
    files = [Source(str(index), index) for index in range(100)]
    sizes = [(index * 37) % 11 + 1 for index in range(100)]
    shares = plan_parts(files, sizes, part_bytes=60)
    assert [file for share in shares for file in share] == files
    sums = [sum(sizes[file.path] for file in share) for share in shares]
    assert max(sums) <= 60 + 11
    assert min(sums) >= 60 - 2 * 11
    assert plan_parts([], []) == []


def test_good_slides_are_written_and_bad_ones_named(tmp_path):
    files = folder(tmp_path / "in", dims=(4, 5, 4))
    np.save(tmp_path / "in" / "s2.npy", np.zeros((2, 4), np.float32))
    outcomes = write_part(PartPlan("npy", files, Shape(4, "float32")), tmp_path)
    assert [outcome.n_patches for outcome in outcomes] == [3, 0, 0]
    assert outcomes[1].reason == "features have 5 dimensions, other slides 4"
    assert "all zero" in outcomes[2].reason
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == [".json", ".parquet"]


def test_a_finished_part_is_taken_up_and_a_changed_one_written_again(tmp_path):
    files = folder(tmp_path / "in")
    plan = PartPlan("npy", files, Shape(4, "float32"))
    outcomes = write_part(plan, tmp_path)
    target = tmp_path / f"{plan.key}.parquet"
    written = target.stat().st_mtime_ns
    assert write_part(plan, tmp_path) == outcomes
    assert target.stat().st_mtime_ns == written
    target.write_bytes(target.read_bytes()[:-1])  # cut short by a crash of the machine
    assert write_part(plan, tmp_path) == outcomes
    assert target.stat().st_mtime_ns != written
    key = plan.key
    np.save(tmp_path / "in" / "s0.npy", np.ones((9, 4), np.float32))
    assert plan.key != key


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_part_with_a_damaged_record_is_written_again(tmp_path, damage):
    plan = PartPlan("npy", folder(tmp_path / "in"), Shape(4, "float32"))
    outcomes = write_part(plan, tmp_path)
    record = tmp_path / f"{plan.key}.json"
    whole = record.read_text()
    record.write_text(damage)
    assert write_part(plan, tmp_path) == outcomes
    assert record.read_text() == whole


def test_two_writes_give_the_same_bytes(tmp_path):
    plan = PartPlan("npy", folder(tmp_path / "in"), Shape(4, "float32"))
    data = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_part(plan, tmp_path / name)
        data.append((tmp_path / name / f"{plan.key}.parquet").read_bytes())
    assert data[0] == data[1]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota")])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch, error):
    plan = PartPlan("npy", folder(tmp_path / "in"), Shape(4, "float32"))
    (tmp_path / "work").mkdir()

    def full(*_):
        raise error

    monkeypatch.setattr(parts, "patch_table", full)
    with pytest.raises(CohortError, match=f"the disk of {tmp_path} is full"):
        write_part(plan, tmp_path / "work")
    assert list((tmp_path / "work").iterdir()) == []


def test_a_device_that_is_really_full(tmp_path, monkeypatch):
    plan = PartPlan("npy", folder(tmp_path / "in"), Shape(4, "float32"))
    monkeypatch.setattr(parts, "part_writer", lambda _, schema: writer("/dev/full", schema))
    writer = __import__("deco_ray.cohort.writer", fromlist=["part_writer"]).part_writer
    with pytest.raises(CohortError, match="is full"):
        write_part(plan, tmp_path)


def test_a_full_disk_while_the_record_is_written(tmp_path, monkeypatch):
    plan = PartPlan("npy", folder(tmp_path / "in"), Shape(4, "float32"))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts, "write_atomically", full)
    with pytest.raises(CohortError, match="is full"):
        write_part(plan, tmp_path)
    monkeypatch.undo()
    assert [outcome.reason for outcome in write_part(plan, tmp_path)] == ["", "", ""]


def test_the_shape_is_that_of_most_slides(tmp_path):
    files = folder(tmp_path, dims=(5, 4, 4))
    guess = first_shape("npy", files)
    assert guess == Shape(5, "float32")
    outcomes = write_part(PartPlan("npy", files, guess), None)
    assert settled_shape(outcomes, guess) == Shape(4, "float32")
    assert settled_shape([], guess) == guess


def test_float16_stays_only_if_all_slides_are(tmp_path):
    files = folder(tmp_path, dtype=np.float16)
    guess = first_shape("npy", files)
    assert settled_shape(write_part(PartPlan("npy", files, guess), None), guess) == Shape(4, "float16")
    np.save(tmp_path / "s2.npy", np.ones((2, 4), np.float32))
    assert settled_shape(write_part(PartPlan("npy", files, guess), None), guess) == Shape(4, "float32")


def test_the_record_is_plain_json(tmp_path):
    plan = PartPlan("npy", folder(tmp_path / "in"), Shape(4, "float32"))
    write_part(plan, tmp_path)
    record = json.loads((tmp_path / f"{plan.key}.json").read_text())
    assert [row["slide_id"] for row in record["outcomes"]] == ["s0", "s1", "s2"]
