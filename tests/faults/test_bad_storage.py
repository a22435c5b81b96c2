"""A store that fills up or turns read-only within a stage: told plainly, nothing half-written, mended later."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_site import InMemory, fingerprint, leftovers, tiny_config

from deco_ray.cohort import Cohort
from deco_ray.errors import DecoError
from deco_ray.experiments.schedule import Workplace, make
from deco_ray.experiments.session import check_storage
from deco_ray.experiments.study import Study
from deco_ray.results.predict import check_output


def train_judge(cohort: Cohort, storage: Path, report: Callable[[dict], None] = lambda metrics: None) -> Study:
    config = tiny_config(cohort.uri, storage, seeds=[0])
    study = Study(config)
    study.add(config)
    judge = next(stage for stage in study.graph if stage.title == "judge seed 0")
    place = Workplace(study.graph.stages, study.sites, {cohort.checksum: InMemory(cohort)}, config.resources)
    make(judge, place, report)
    return study


@pytest.fixture(scope="module")
def calm_storage(tiny_cohort, tmp_path_factory):
    storage = tmp_path_factory.mktemp("calm")
    train_judge(tiny_cohort, storage)
    return storage


@pytest.fixture(scope="module")
def calm(calm_storage):
    return fingerprint(calm_storage)


@pytest.fixture(scope="module")
def needed(calm_storage) -> int:
    """What a judge takes on a disk whose blocks have 4 kB."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in calm_storage.glob("*/model/*/*"))


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("write", [1, 2, 3])  # the note about the cohort comes before; checkpoints, then the record
def test_the_stage_says_so_and_the_same_command_completes(write, reason, tiny_cohort, tmp_path, calm, monkeypatch):
    train_judge_config = tiny_config(tiny_cohort.uri, tmp_path, seeds=[0])
    Study(train_judge_config).add(train_judge_config)  # writes what precedes every stage
    flush, written = os.fsync, []

    def full(file: int) -> None:
        written.append(file)
        if len(written) >= write:
            raise OSError(reason, os.strerror(reason))
        flush(file)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DecoError, match=f"cannot write to .*{os.strerror(reason)}.*make room"):
        train_judge(tiny_cohort, tmp_path)
    monkeypatch.undo()
    assert len(written) >= write
    assert fingerprint(tmp_path) == {}
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]
    train_judge(tiny_cohort, tmp_path)
    assert fingerprint(tmp_path) == calm
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("epoch", "short_kb"), [(0, 4), *((1, short) for short in (4, 8, 12, 16, 20, 24, 100, 300))])
def test_a_disk_that_is_really_full_is_told_wherever_it_fills_up(epoch, short_kb, disk, tiny_cohort, calm, needed):
    """By one block or by more: files are written by torch, pyarrow and ourselves, each with errors of its own."""
    storage, others = disk.path / f"runs {epoch} {short_kb}", disk.path / "others"
    subprocess.run(disk.remount("size=16m"), check=True)

    def fill(metrics: dict) -> None:
        if metrics["epoch"] == epoch:
            others.write_bytes(bytes(shutil.disk_usage(disk.path).free - max(0, needed - 1024 * short_kb)))

    with pytest.raises(DecoError, match=r"cannot write to .*No space left on device.*make room"):
        train_judge(tiny_cohort, storage, fill)
    assert fingerprint(storage) == {}
    assert not [path for path in storage.rglob("*") if path.name.endswith(".tmp")]
    others.write_bytes(b"")
    train_judge(tiny_cohort, storage)
    assert fingerprint(storage) == calm
    assert leftovers(storage) == []
    shutil.rmtree(storage)


def test_a_disk_that_is_full_already_is_told_before_anything_runs(disk):
    others = disk.path / "others"
    others.write_bytes(bytes(shutil.disk_usage(disk.path).free))
    with pytest.raises(DecoError, match=r"cannot write to the storage folder .*No space left.*set `storage`"):
        check_storage(str(disk.path / "runs"))
    with pytest.raises(DecoError, match=r"cannot write to .*No space left.*choose another --out"):
        check_output(disk.path / "grades.csv")
    assert not list(disk.path.glob("**/.*"))
    others.write_bytes(b"")


def test_a_read_only_disk_is_told_before_anything_runs(disk):
    gc.collect()  # a failed test's frames hold files open
    subprocess.run(disk.remount("ro"), check=True)
    with pytest.raises(DecoError, match=r"cannot write to the storage folder .*Read-only file system.*set `storage`"):
        check_storage(str(disk.path / "runs"))


def test_a_storage_that_cannot_be_made_is_told_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DecoError, match=r"cannot write to the storage folder .*Not a directory.*set `storage`"):
        check_storage(str(tmp_path / "file" / "runs"))
