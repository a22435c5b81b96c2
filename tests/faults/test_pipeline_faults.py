"""Whole pipelines under faults: what survives by itself, what the same command mends, what is refused and how fast."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_tiny_cohort
from pipeline_site import fingerprint, leftovers, tiny_config

PROGRAM = Path(__file__).with_name("faulty_pipeline.py")
PATIENCE_S = 900  # for a hang only: no result depends on it
FAIL_FAST_S = 30  # an error that no retry can mend ends the job within this
LARGE = {"seeds": [0], "judge.options": {"hidden": 16}, "model.options": {"hidden": 16}, "training.epochs": 1}
pytestmark = pytest.mark.timeout(2000)


def act(cohort, storage, *faults: dict, **settings) -> dict:
    # one run at a time where none of several is to be killed: every further one starts a process of its own
    alone = None if faults else 1
    settings = {
        "report.heatmaps": 0,
        "judge_training.epochs": 3,
        "training.epochs": 3,
        "resources.max_concurrent": alone,
        **settings,
    }
    return {"config": tiny_config(cohort, storage, **settings).model_dump(mode="json"), "faults": faults}


def fault(what: str, stage: str, at: int = 1) -> dict:
    return {"what": what, "stage": stage, "at": at}


def play(*acts: dict, **cluster) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), json.dumps({"acts": acts, **cluster})]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def results(run: subprocess.CompletedProcess[str]) -> list[dict]:
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def stamps(storage: Path) -> dict[str, int]:
    """When each finished artefact was written, by kind and digest."""
    return {
        f"{path.parent.parent.name}/{path.parent.name}": path.stat().st_mtime_ns
        for path in storage.glob("*/*/*/artefact.json")
    }


def resumes(storage: Path) -> int:
    """How often a training went on from a checkpoint."""
    return sum(json.loads(path.read_text())["resumes"] for path in storage.glob("*/model/*/metrics.json"))


def without_finals(storage: Path, target: Path) -> Path:
    """A copy of the storage in which the final models are still to be trained."""
    shutil.copytree(storage, target)
    for record in target.glob("*/model/*/artefact.json"):
        if json.loads(record.read_text())["stage"] == "final":
            shutil.rmtree(record.parent)
    shutil.rmtree(next(target.glob("*/report")))
    return target


@pytest.fixture(scope="module")
def stage(tmp_path_factory, mounted):
    """A calm pipeline, and on the same Ray those whose faults leave the driver alive."""
    root = tmp_path_factory.mktemp("faults")
    cohort = write_tiny_cohort(root / "tiny").uri
    # features of 40 MB: over half of the smallest object store that Ray starts, under half of the calm one's
    large = write_tiny_cohort(root / "large", slides=(7, 6, 6), dim=512, patches=(1040, 1060)).uri
    broken = root / "broken"
    shutil.copytree(cohort, broken)
    part = broken / "patches" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    calm, large_calm = act(cohort, root / "calm"), act(large, root / "large calm", **LARGE)
    first = results(play(calm, large_calm, cpus=1))
    late, spoilt = (without_finals(root / "calm", root / name) for name in ("late", "spoilt"))
    assignments = next(spoilt.glob("*/anchors/*/assignments.parquet"))
    assignments.write_bytes(assignments.read_bytes()[:-200])
    kept = stamps(late)
    names = ("trials", "truncated", "late", "spoilt", "untracked", "tracked", *(("full", "mended") if mounted else ()))
    tracking = {"tracking.enabled": True, "tracking.log_models": False}
    tried = results(
        play(
            act(
                cohort,
                root / "trials",
                fault("trial", "judge seed 0"),
                fault("trial", "contributions seed 1"),
                fault("trial", "final seed 1", 2),
            ),
            act(str(broken), root / "truncated"),
            act(str(broken), late),
            act(cohort, spoilt),
            act(cohort, root / "tracked", seeds=[0], **tracking, **{"tracking.uri": "http://127.0.0.1:1"}),
            act(cohort, root / "tracked", seeds=[0], **tracking),
            *(full_disk(cohort, mounted) if mounted else ()),
        )
    )
    found = dict(zip(names, tried, strict=True)) | dict(zip(("calm", "large calm"), first, strict=True))
    return {"root": root, "cohort": cohort, "large": large, "kept": kept, "acts": found}


def full_disk(cohort, disk) -> list[dict]:
    """The same command on a disk with room for anchors but not for a checkpoint, and again when it is larger."""
    again = act(cohort, disk.path / "runs", seeds=[0])
    return [{**again, "before": disk.remount(f"size={size}")} for size in ("700k", "64m")]


def test_a_full_disk_is_told_and_the_same_command_completes_when_there_is_room(stage, disk):
    full, mended = stage["acts"]["full"], stage["acts"]["mended"]
    assert re.search(r"judge seed 0: cannot write to .*No space left on device.*make room", full["error"])
    assert full["starts"] == {"judge seed 0": 1}
    assert full["seconds"] < FAIL_FAST_S
    assert mended["failures"] == {}
    expected, found = fingerprint(stage["root"] / "calm"), fingerprint(disk.path / "runs")
    assert found == {name: expected[name] for name in found}
    assert len(found) == 4
    assert leftovers(disk.path / "runs") == []


def test_killed_trials_resume_by_themselves(stage):
    root, told = stage["root"], stage["acts"]["trials"]
    assert len(told["struck"]) == 3
    assert told["failures"] == {}
    assert fingerprint(root / "trials") == fingerprint(root / "calm")
    assert resumes(root / "trials") == 2  # the judge and the final model; scoring keeps its own parts
    assert resumes(root / "calm") == 0
    assert leftovers(root / "trials") == []


def test_a_truncated_part_is_told_with_its_slide_and_nothing_is_half_written(stage):
    told = stage["acts"]["truncated"]
    assert told["starts"] == {}
    assert told["seconds"] < FAIL_FAST_S
    assert "slide s" in told["error"]
    assert "the cohort is damaged, ingest it again" in told["error"]
    assert fingerprint(stage["root"] / "truncated") == {}
    assert not [path for path in leftovers(stage["root"] / "truncated") if path.endswith(".tmp")]


def test_a_part_truncated_late_costs_only_what_still_needs_it(stage):
    told, late = stage["acts"]["late"], stage["root"] / "late"
    assert "final seed 0: slide s" in told["error"]
    assert told["starts"] == {"final seed 0": 1, "final seed 1": 1}
    assert stamps(late) == stage["kept"]
    assert all("model-" in path for path in leftovers(late))


def test_a_deterministic_error_is_tried_once_and_names_its_stage(stage):
    told = stage["acts"]["spoilt"]
    assert told["seconds"] < FAIL_FAST_S
    assert "final seed 1: " in told["error"]
    assert "assignments.parquet" in told["error"]
    assert told["starts"] == {"final seed 0": 1, "final seed 1": 1}


def test_an_absent_tracking_server_costs_one_warning_and_is_made_up_for_later(stage):
    absent, later = stage["acts"]["untracked"], stage["acts"]["tracked"]
    assert absent["failures"] == {}
    assert absent["warned"].count("tracking is off") == 1
    assert later["warned"] == ""
    expected = fingerprint(stage["root"] / "calm")
    found = fingerprint(stage["root"] / "tracked")
    assert found == {name: expected[name] for name in found}
    assert tracked_epochs(stage["root"] / "tracked") == {"judge seed 0": [0, 1, 2], "final seed 0": [0, 1, 2]}


def tracked_epochs(storage: Path) -> dict[str, list[int]]:
    """The steps of every child's validation curve in the order they were logged; fails on any doubled point."""
    with sqlite3.connect(storage / "mlflow.db") as database:
        doubled = database.execute(
            "SELECT run_uuid, key, step, COUNT(*) FROM metrics GROUP BY run_uuid, key, step HAVING COUNT(*) > 1"
        ).fetchall()
        rows = database.execute(
            "SELECT name, step FROM metrics JOIN runs USING (run_uuid) WHERE key = 'epochs/val_macro_f1' "
            "ORDER BY name, timestamp, metrics.rowid"
        ).fetchall()
    assert doubled == []
    return {name: [step for owner, step in rows if owner == name] for name in {name for name, _ in rows}}


def test_a_killed_and_then_interrupted_driver_goes_on_where_it_was(stage):
    """Killed after the first judge, stopped by Ctrl-C within a final model's training, then left alone.

    Tune takes the signal of Ctrl-C itself and returns, which must not look like an ordinary end.
    """
    root, storage = stage["root"], stage["root"] / "driver"
    settings = {"tracking.enabled": True, "tracking.log_models": False}
    first = play(act(stage["cohort"], storage, fault("driver", "contributions seed 0"), **settings), cpus=1)
    assert first.returncode == -signal.SIGKILL
    assert any(name.startswith("model/") for name in stamps(storage))
    again = play(act(stage["cohort"], storage, fault("interrupt", "final seed 1", 2), **settings), cpus=1)
    assert again.returncode not in (0, -signal.SIGKILL)
    assert again.stderr.rstrip().endswith("KeyboardInterrupt"), again.stderr[-3000:]
    assert "not logged to MLflow" not in again.stderr
    with sqlite3.connect(storage / "mlflow.db") as database:
        parents = database.execute("SELECT status FROM runs WHERE name NOT LIKE '%seed%' ORDER BY start_time")
        assert parents.fetchall()[-1] == ("KILLED",)
    assert not [path for path in leftovers(storage) if path.endswith(".tmp")]
    before = stamps(storage)
    assert list(storage.glob("*/work/model-*/checkpoint.pt"))
    (told,) = results(play(act(stage["cohort"], storage, **settings), cpus=1))
    assert told["failures"] == {}
    assert fingerprint(storage) == fingerprint(root / "calm")
    after = stamps(storage)
    assert {name: after[name] for name in before} == before
    assert resumes(storage) >= 1
    assert leftovers(storage) == []
    titles = [f"{kind} seed {seed}" for kind in ("final", "judge") for seed in (0, 1)]
    assert tracked_epochs(storage) == {title: [0, 1, 2] for title in titles}


def test_a_node_lost_at_every_stage_costs_time_only(stage):
    storage = stage["root"] / "nodes"
    losses = [fault("node", "judge seed 0"), fault("node", "contributions seed 1"), fault("node", "final seed 0", 2)]
    (told,) = results(play(act(stage["cohort"], storage, *losses), nodes=3))
    assert len(told["struck"]) == 3
    assert told["failures"] == {}
    assert fingerprint(storage) == fingerprint(stage["root"] / "calm")
    assert leftovers(storage) == []


def test_an_object_store_too_small_for_the_cohort_streams_it(stage):
    root = stage["root"]
    assert "in shared memory" in stage["acts"]["large calm"]["said"]
    (told,) = results(play(act(stage["large"], root / "small", **LARGE), cpus=1, store_mb=76))
    assert "streamed" in told["said"]
    assert told["failures"] == {}
    assert fingerprint(root / "small") == fingerprint(root / "large calm")
