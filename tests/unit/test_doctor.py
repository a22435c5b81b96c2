"""The doctor: facts about this machine, and each thing that can be wrong in plain words."""

import socket
from collections import namedtuple

import pytest

from deco_ray import doctor
from deco_ray.config import load_config

GB = 2**30


def problems(check, *arguments):
    findings = doctor.Findings()
    check(findings, *arguments)
    return findings.problems


def test_the_whole_examination_prints_facts_without_starting_ray(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_ADDRESS", *doctor.THREAD_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    code = doctor.main(["--set", f"storage={tmp_path / 'runs'}"])
    text = capsys.readouterr().out
    for name in ("python", "torch", "ray ", "faiss-cpu", "mlflow", "pyarrow", "cpus", "gpus", "memory", "object store"):
        assert f"\n{name}" in f"\n{text}"
    assert f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}" in text
    assert code == ("What is wrong" in text)  # whatever is wrong with this machine
    assert not list(tmp_path.iterdir())


def test_requirements_that_are_not_met_come_with_the_command():
    told = doctor.unmet(["torch>=99", "no-such-package>=1", "numpy>=1", "absent; extra == 'dev'"])
    assert len(told) == 2
    assert "wanted torch>=99: pip install 'torch>=99'" in told[0]
    assert "no-such-package is not installed" in told[1]


@pytest.mark.parametrize(
    ("memory", "shared", "message"),
    [
        (32 * GB, GB // 16, "/dev/shm has 0.1 GB, less than the 9.6 GB object store"),
        (GB, GB, "use a machine with more memory"),
        (32 * GB, 16 * GB, None),
        (32 * GB, None, None),
    ],
)
def test_shared_memory_must_hold_the_object_store(memory, shared, message):
    text, problem = doctor.object_store(memory, shared)
    assert "30% of memory" in text
    assert (message is None) == (problem is None)
    assert message is None or message in problem


@pytest.mark.parametrize(
    ("mode", "has_token", "message"),
    [
        (None, True, "export RAY_AUTH_MODE=token"),
        (None, False, None),
        ("token", True, None),
        ("off", False, "means nothing"),
    ],
)
def test_the_authentication_trap(mode, has_token, message):
    told = doctor.authentication_problems(mode, has_token)
    assert (told == []) if message is None else (message in told[0])


def test_a_running_cluster_is_found_by_its_note_and_a_dead_address_is_a_problem(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        environ = {"RAY_TMPDIR": str(tmp_path), "RAY_AUTH_MODE": "disabled"}
        findings = doctor.Findings()
        doctor.check_ray(findings, environ)
        assert ("ray cluster", f"running at {address}") in findings.facts
        assert findings.problems == []
    assert problems(doctor.check_ray, environ) == []  # a note left behind by a cluster that has gone
    told = problems(doctor.check_ray, {**environ, "RAY_ADDRESS": f"ray://{address}", "RAY_TRAIN_V2_ENABLED": "0"})
    assert "nothing answers there" in told[0]
    assert "Ray Train v2" in told[1]


def test_a_card_that_torch_cannot_use_and_gpus_nobody_has(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "graphics_cards", lambda: 2)
    told = problems(doctor.check_processors, load_config(None, ["resources.gpus_per_run=0.5"]))
    assert "2 NVIDIA GPU(s) but torch" in told[0]
    assert "gpus_per_run is 0.5 but this node has 0" in told[1]


def test_storage_that_is_full_or_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "not a folder one can write to" in problems(doctor.check_storage, str(tmp_path / "file" / "runs"))[0]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10 * GB, 9 * GB, GB))
    assert problems(doctor.check_storage, str(tmp_path / "runs")) == [
        f"only 1.0 GB free at {tmp_path}: models and checkpoints need 5 GB"
    ]


def test_tracking_traps_and_hidden_passwords(tmp_path):
    def check(uri, here=tmp_path):
        findings = doctor.Findings()
        doctor.check_tracking(findings, load_config(None, [f"tracking.uri={uri}"] if uri else []), here)
        return findings

    assert check(None).problems == []
    assert "no longer writes to" in check("mlruns").problems[0]
    told = check("http://me:secret@127.0.0.1:1/x")
    assert "no tracking server answers" in told.problems[0]
    assert "secret" not in str(told)
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("")
    assert "old MLflow file store" in check(None).problems[0]


def test_thread_variables():
    assert problems(doctor.check_threads, {"OMP_NUM_THREADS": "2"}, 2) == []
    assert "slow the others" in problems(doctor.check_threads, {"OMP_NUM_THREADS": "64"}, 2)[0]
    assert "not a number" in problems(doctor.check_threads, {"MKL_NUM_THREADS": "many"}, 2)[0]
