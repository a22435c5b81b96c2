"""Ingest from end to end on Ray Data: what goes in comes out, what is wrong is told at once, kills cost little."""

from __future__ import annotations

import csv
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from deco_ray.cohort import Cohort, ingest, ingestion, parts, stream
from deco_ray.cohort.ingest_command import main
from deco_ray.cohort.splits import load_split
from deco_ray.errors import CohortError
from deco_ray.keys import generator

pytestmark = pytest.mark.usefixtures("ray_cluster")
CLASSES = ("negative", "itc", "macro")


def clam_folder(root: Path, slides: int = 9, dim: int = 8, seed: int = 0) -> Path:
    """What CLAM and its user leave behind: h5_files, labels.csv, classes.yaml, splits_0.csv."""
    (root / "h5_files").mkdir(parents=True)
    rows, columns = [], {"train": [], "val": [], "test": []}
    for index in range(slides):
        rng = generator(seed, "clam folder", index)
        n = int(rng.integers(3, 30))
        slide = f"{index:03d}"
        with h5py.File(root / "h5_files" / f"{slide}.h5", "w") as file:
            file["features"] = rng.normal(0, 1, (n, dim)).astype(np.float32)
            file["coords"] = (rng.integers(0, 99, (n, 2)) * 512).astype(np.int32)
        rows.append((f"case{index // 2}", slide, CLASSES[index % 3]))
        columns[["train", "val", "test", "train"][index % 4]].append(slide)
    with open(root / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("case_id", "slide_id", "label"), *rows])
    with open(root / "splits_0.csv", "w") as file:
        file.write(",train,val,test\n")
        for index in range(len(columns["train"])):
            cells = [ids[index] if index < len(ids) else "" for ids in columns.values()]
            file.write(f"{index},{','.join(cells)}\n")
    (root / "classes.yaml").write_text("classes: [negative, itc, macro]\nnormal_class: negative\n")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def real_folder(root: Path) -> tuple[Path, list[str]]:
    """Bags of real tiles where the checkout's neighbour can make them, else a folder of the same kind."""
    script = Path(__file__).parents[3] / "shared" / "real" / "make_bags.py"
    if not script.is_file():
        return clam_folder(root), list(CLASSES)
    options = ["--train", "4,3,2,2,1", "--val", "1", "--test", "1", "--size", "20,40"]
    subprocess.run([sys.executable, str(script), str(root), *options], check=True, capture_output=True)
    return root, ["healthy", "serrated", "tubular", "villous", "adenocarcinoma"]


def test_a_clam_folder_reads_back_equal_and_keeps_its_split(tmp_path):
    source, classes = real_folder(tmp_path / "in")
    cohort = ingest(source, tmp_path / "out", classes=classes)
    with open(source / "labels.csv", newline="") as file:
        labels = {row["slide_id"]: row for row in csv.DictReader(file)}
    assert sorted(cohort.slides["slide_id"]) == sorted(labels)
    for slide, row in labels.items():
        bag = cohort.bag(slide)
        with h5py.File(source / "h5_files" / f"{slide}.h5") as file:
            features, coords = file["features"][()], file["coords"][()]
        expected = torch.nn.functional.normalize(torch.from_numpy(features), dim=1)
        torch.testing.assert_close(bag.features, expected, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(bag.coords, coords)
        assert cohort.classes[bag.label] == row["label"]
        assert cohort.row(slide)["case_id"] == row["case_id"]
    split = load_split(cohort, "splits_0")
    with open(source / "splits_0.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for part in ("train", "val", "test"):
        assert sorted(split.ids(part)) == sorted(row[part] for row in rows if row[part])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_two_runs_and_any_resume_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(ingestion, "plan_parts", lambda files, sizes: parts.plan_parts(files, sizes, 2000))
    source = clam_folder(tmp_path / "in", slides=12)
    first = ingest(source, tmp_path / "a", name="x")
    assert first.slides["part"].nunique() >= 3
    # a run that was cut short after its first parts, then taken up
    plans = []
    run = ingestion._pass
    monkeypatch.setattr(
        ingestion, "_pass", lambda *a: plans.extend(run(*a)) or (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        ingest(source, tmp_path / "b", name="x")
    assert not (tmp_path / "b").exists()
    work = tmp_path / ".b.ingest"
    kept = work / f"{plans[0].plan.key}.parquet"
    for part in plans[1:]:
        (work / f"{part.plan.key}.json").unlink()
    inode = kept.stat().st_ino
    monkeypatch.setattr(ingestion, "_pass", run)
    ingest(source, tmp_path / "b", name="x")
    assert (tmp_path / "b" / "patches" / "part-00000.parquet").stat().st_ino == inode  # taken up, not written again
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not work.exists()


def test_the_number_of_workers_changes_no_byte(tmp_path, monkeypatch):
    source = clam_folder(tmp_path / "in")
    monkeypatch.setattr(parts, "LEAST_BYTES", 1)  # several parts of a few slides
    ingest(source, tmp_path / "many" / "cohort")
    monkeypatch.setattr(stream, "run_blocks", functools.partial(stream.run_blocks, concurrency=1))
    ingest(source, tmp_path / "one" / "cohort")
    many = contents(tmp_path / "many")
    assert len([name for name in many if "part-" in name]) == parts.LEAST_PARTS
    assert many == contents(tmp_path / "one")


def test_every_problem_of_a_folder_is_told_at_once_and_nothing_is_written(tmp_path):
    source = clam_folder(tmp_path / "in", slides=18)
    files = source / "h5_files"

    def spoil(slide, **arrays):
        with h5py.File(files / f"{slide}.h5", "r+") as file:
            for name, array in arrays.items():
                del file[name]
                file[name] = array

    ones = np.ones((4, 8), np.float32)
    spoil("000", features=np.where(np.arange(32).reshape(4, 8) == 9, np.nan, 1), coords=np.zeros((4, 2)))
    spoil("001", features=ones * [[1], [0], [1], [1]], coords=np.zeros((4, 2)))
    spoil("002", features=np.ones((4, 7), np.float32), coords=np.zeros((4, 2)))
    spoil("003", features=np.zeros((0, 8), np.float32), coords=np.zeros((0, 2)))
    spoil("004", coords=np.zeros((99, 2)))
    spoil("005", features=np.full((4, 8), np.inf), coords=np.zeros((4, 2)))
    data = (files / "006.h5").read_bytes()
    (files / "006.h5").write_bytes(data[: len(data) // 2])
    (files / "007.h5").write_text("not HDF5")
    shutil.copy(files / "008.h5", files / "unlabelled.h5")
    shutil.copy(files / "008.h5", files / "a..b.h5")
    shutil.copy(files / "008.h5", files / os.fsdecode(b"\xff.h5"))
    with open(source / "labels.csv", "a") as file:
        file.write("c,gone,itc\nc,009,itc\nc,../up,itc\nc,010x,ITC\n")
    shutil.copy(files / "008.h5", files / "010x.h5")
    with pytest.raises(CohortError) as caught:
        ingest(source, tmp_path / "out", classes=[*CLASSES, "unused"])
    text = str(caught.value)
    for expected in (
        "slide 000 (h5_files/000.h5): NaN or Inf in 1 of 4 patches, first in patch 1",
        "slide 001 (h5_files/001.h5): 1 of 4 patches are all zero",
        "slide 002 (h5_files/002.h5): features have 7 dimensions, other slides 8",
        "slide 003 (h5_files/003.h5): no patches (empty bag)",
        "slide 004 (h5_files/004.h5): ",
        "but 99 coords",
        "slide 005 (h5_files/005.h5): NaN or Inf in 4 of 4",
        "slide 006 (h5_files/006.h5): truncated or not an HDF5 file",
        "slide 007 (h5_files/007.h5): truncated or not an HDF5 file",
        "slide unlabelled (h5_files/unlabelled.h5): has no label in labels.csv",
        "slide a..b (h5_files/a..b.h5): slide id 'a..b'",
        r"slide \udcff (h5_files/\udcff.h5): slide id",
        "slide gone (labels.csv): labelled but has no feature file",
        "slide 009 (labels.csv): duplicate slide id",
        "slide ../up (labels.csv): slide id '../up'",
        "slide 010x (labels.csv): label 'ITC' is not among the classes: negative, itc, macro, unused",
        "class unused): no slide has this class",
        "on-error skip",
    ):
        assert expected in text, text
    assert [path.name for path in tmp_path.iterdir()] == ["in"]

    cohort = ingest(source, tmp_path / "out", classes=CLASSES, on_error="skip")
    with open(tmp_path / "out" / "rejected.csv", newline="") as file:
        rejected = {row["slide_id"]: row for row in csv.DictReader(file)}
    assert set(rejected) == {
        *(f"{i:03d}" for i in (0, 1, 2, 3, 4, 5, 6, 7, 9)),
        "unlabelled",
        "a..b",
        r"\udcff",
        "gone",
        "../up",
        "010x",
    }
    assert rejected["002"]["reason"] == "features have 7 dimensions, other slides 8"
    assert list(cohort.slides["slide_id"]) == ["008", *(f"{i:03d}" for i in range(10, 18))]
    assert set(load_split(cohort, "splits_0").assignment) == set(cohort.slides["slide_id"])


def test_a_class_that_loses_its_last_slide_is_refused_even_when_skipping(tmp_path):
    source = clam_folder(tmp_path / "in", slides=3)
    (source / "h5_files" / "001.h5").write_text("x")
    with pytest.raises(CohortError, match=r"class itc.*no slide has this class"):
        ingest(source, tmp_path / "out", on_error="skip")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_mixed_precision_and_an_odd_first_file_settle_on_the_majority(tmp_path):
    for index, (dim, dtype) in enumerate([(5, "f4"), (4, "f2"), (4, "f4"), (4, "f2")]):
        np.save(tmp_path / f"s{index}.npy", np.full((2, dim), index + 1, dtype))
    (tmp_path / "labels.csv").write_text("slide_id,label\ns0,0\ns1,0\ns2,1\ns3,0\n")
    cohort = ingest(tmp_path, tmp_path / "out", on_error="skip")
    assert (cohort.dim, cohort.meta.dtype, list(cohort.slides["slide_id"])) == (4, "float32", ["s1", "s2", "s3"])


def test_slides_without_labels_can_be_taken_for_prediction(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 4), np.float32))
    with pytest.raises(CohortError, match=r"no labels at .*labels.csv.*--unlabelled"):
        ingest(tmp_path, tmp_path / "out")
    cohort = ingest(tmp_path, tmp_path / "out", unlabelled=True, classes=["x", "y"])
    assert cohort.bag("a").label == -1
    assert cohort.classes == ("x", "y")


def test_a_full_disk_is_told_before_and_while_writing(tmp_path, monkeypatch):
    source = clam_folder(tmp_path / "in")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(CohortError, match="too full: the cohort needs about"):
        ingest(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    monkeypatch.undo()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ingestion, "write_index", full)
    with pytest.raises(CohortError, match="No space left on device; nothing was written"):
        ingest(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_places_that_cannot_be_written_are_refused(tmp_path):
    source = clam_folder(tmp_path / "in", slides=3)
    with pytest.raises(CohortError, match="exists already"):
        ingest(source, source)
    with pytest.raises(CohortError, match="object store"):
        ingest(source, "s3://bucket/x")
    with pytest.raises(CohortError, match="choose stop or skip"):
        ingest(source, tmp_path / "out", on_error="ignore")
    (source / "splits_1.csv").write_text(",train,val,test\n0,000,001,nobody\n")
    with pytest.raises(CohortError, match=r"slide nobody \(splits_1.csv\): in the split but not among the slides"):
        ingest(source, tmp_path / "out")


def test_the_command_prints_one_table(tmp_path, capsys):
    source = clam_folder(tmp_path / "in")
    (source / "h5_files" / "000.h5").write_text("x")
    assert main([str(source), str(tmp_path / "out"), "--on-error", "skip", "--classes", "negative,itc,macro"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:6]] == [
        ["class", "slides"],
        ["negative", "2"],
        ["itc", "3"],
        ["macro", "3"],
        ["all", "8"],
        ["rejected", "1"],
    ]
    assert out.splitlines()[-1] == "kept split splits_0; use it with --set split.name=splits_0"
    shutil.copy(source / "splits_0.csv", source / "splits_1.csv")
    assert main([str(source), str(tmp_path / "two"), "--on-error", "skip"]) == 0
    assert "kept splits splits_0, splits_1; use one with --set split.name=splits_0\n" in capsys.readouterr().out
    assert main([str(source), str(tmp_path / "none"), "--on-error", "skip", "--no-splits"]) == 0
    assert "kept" not in capsys.readouterr().out
    assert str(tmp_path / "out") in out
    assert Cohort.open(tmp_path / "out").name == "out"


def test_a_killed_ingest_goes_on_where_it_stopped(tmp_path):
    source = clam_folder(tmp_path / "in", slides=12)
    code = f"""
import os, time
from deco_ray.cluster import start_ray
from deco_ray.cohort import ingest, ingestion, parts
ingestion.plan_parts = lambda files, sizes: parts.plan_parts(files, sizes, 2000)
start_ray(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False)
rename = os.rename
def stuck(*_):
    print("assembling", flush=True)
    time.sleep(600)
ingestion.os.rename = stuck
ingest({str(source)!r}, {str(tmp_path / "out")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert any("assembling" in line for line in process.stdout)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "out").exists()
    kept = {path.stat().st_ino for path in (tmp_path / ".out.ingest").glob("*.parquet")}
    assert len(kept) >= 3
    original = ingestion.plan_parts
    try:
        ingestion.plan_parts = lambda files, sizes: parts.plan_parts(files, sizes, 2000)
        cohort = ingest(source, tmp_path / "out")
    finally:
        ingestion.plan_parts = original
    assert {path.stat().st_ino for path in (tmp_path / "out" / "patches").iterdir()} == kept
    assert len(cohort.slides) == 12
    assert not (tmp_path / ".out.ingest").exists()
