"""A store that fills up or turns read-only within a stage: told plainly, nothing half-written, mended later."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from pipeline_site import InMemory, fingerprint, leftovers, tiny_config

from deco_ray.cohort import Cohort
from deco_ray.errors import DecoError
from deco_ray.experiments.schedule import Workplace, make
from deco_ray.experiments.session import check_storage
from deco_ray.experiments.study import Study


def train_judge(cohort: Cohort, storage: Path) -> Study:
    config = tiny_config(cohort.uri, storage, seeds=[0])
    study = Study(config)
    study.add(config)
    judge = next(stage for stage in study.graph if stage.title == "judge seed 0")
    place = Workplace(study.graph.stages, study.sites, {cohort.checksum: InMemory(cohort)}, config.resources)
    make(judge, place, lambda metrics: None)
    return study


@pytest.fixture(scope="module")
def calm(tiny_cohort, tmp_path_factory):
    storage = tmp_path_factory.mktemp("calm")
    train_judge(tiny_cohort, storage)
    return fingerprint(storage)


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


def test_a_storage_that_cannot_be_made_is_told_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DecoError, match=r"cannot write to the storage folder .*Not a directory.*set `storage`"):
        check_storage(str(tmp_path / "file" / "runs"))
