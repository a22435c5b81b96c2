"""Real jobs on a real head node: submitted, uploaded, stopped; the same bits as a local run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from pipeline_site import fingerprint, leftovers, tiny_config

from deco_ray.experiments.demo_command import Head, ray_program

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "full_pipeline.py"
PATIENCE_S = 600  # for a hang only
pytestmark = pytest.mark.timeout(2000)


@pytest.fixture(scope="module")
def head():
    with Head(cpus=1) as started:
        yield started


def submit(head, *arguments, options=()):
    command = [ray_program(), "job", "submit", "--address", head.address, *options, "--", sys.executable, str(JOB)]
    return subprocess.run(
        [*command, *map(str, arguments)], env=head.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def write_config(path, config):
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return path


@pytest.fixture(scope="module")
def local(head, tiny_cohort, tmp_path_factory):
    """The configuration of a run by the same script without RAY_ADDRESS, beside the head and in its folder."""
    root = tmp_path_factory.mktemp("local")
    config = tiny_config(tiny_cohort.uri, root / "runs", seeds=[0])
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["RAY_TMPDIR"] = head.folder
    command = [sys.executable, str(JOB), "--config", str(write_config(root / "job.yaml", config))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return config


def test_a_local_run_never_joins_a_ray_that_happens_to_run_here(local, head):
    assert len(fingerprint(local.storage)) == 4
    sessions = {path.name for path in Path(head.folder).rglob("session_2*")}
    assert len(sessions) == 2  # the head's, and one of its own


def test_the_job_api_asks_for_the_token_and_listens_on_this_machine_only(head):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head.address}/api/jobs/", timeout=60)
    assert refused.value.code in (401, 403)
    family = [psutil.Process(head.process.pid), *psutil.Process(head.process.pid).children(recursive=True)]
    open_to = {
        place.laddr.ip for process in family for place in listening(process) if place.laddr.port == head.dashboard
    }
    assert open_to == {"127.0.0.1"}


def listening(process: psutil.Process) -> list:
    try:
        return [place for place in process.net_connections("tcp") if place.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def test_bad_arguments_end_with_one_message_and_a_failed_job(head, tmp_path):
    done = submit(head, "--set", "anchors.kk=3", "--set", f"storage={tmp_path}")
    assert done.returncode == 1
    assert "unknown key 'anchors.kk'; did you mean 'anchors.k'?" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_submitted_job_gives_the_bits_of_a_local_run(head, local, tiny_cohort, tmp_path):
    """An uploaded folder vanishes with the job: refused with advice, or everything goes where DECO_RAY_HOME says."""
    upload = tmp_path / "upload"
    upload.mkdir()
    (upload / "note.txt").write_text("uploaded")
    config = tiny_config(tiny_cohort.uri, "runs", seeds=[0])
    path = write_config(tmp_path / "job.yaml", config)
    refused = submit(head, "--config", path, options=["--working-dir", str(upload)])
    assert refused.returncode == 1
    assert "runs from an uploaded copy" in refused.stdout
    assert "DECO_RAY_HOME" in refused.stdout
    environment = f'{{"env_vars": {{"DECO_RAY_HOME": "{tmp_path}"}}}}'
    done = submit(head, "--config", path, options=["--working-dir", str(upload), "--runtime-env-json", environment])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DeCo final (abmil)" in done.stdout
    assert fingerprint(tmp_path / "runs") == fingerprint(local.storage)


def test_a_killed_and_then_stopped_job_leaves_no_actors_and_goes_on_later(head, tiny_cohort, tmp_path):
    config = tiny_config(tiny_cohort.uri, tmp_path / "runs", seeds=[0], method="abmil", **{"training.epochs": 400})
    path = write_config(tmp_path / "job.yaml", config)
    for name, prepared in (("to-kill", killer), ("to-stop", stopper)):
        submitted = time.time()
        command = [ray_program(), "job", "submit", "--address", head.address, "--no-wait", "--submission-id", name]
        subprocess.run([*command, "--", sys.executable, str(JOB), "--config", str(path)], env=head.env, check=True)
        end = prepared(head, name, path)
        deadline = time.monotonic() + PATIENCE_S
        while not checkpoint_since(submitted, tmp_path):
            assert time.monotonic() < deadline, "the training never wrote a checkpoint"
            time.sleep(0.1)
        end()
        assert trials_alive(head) == []
        assert not [kind for kind in fingerprint(config.storage) if kind.startswith("model/")]
        # killed between writing a checkpoint and renaming it, a training leaves that file to the next run
        halves = [name for name in leftovers(config.storage) if name.endswith(".tmp")]
        assert all(Path(name).name.startswith(".checkpoint.pt.") for name in halves)
    done = submit(head, "--config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed" in done.stdout
    assert leftovers(config.storage) == []


def checkpoint_since(moment: float, root: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # replaced just now: it is there the next time
        return any(path.stat().st_mtime > moment for path in root.glob("runs/*/work/model-*/checkpoint.pt"))
    return False


def stopper(head, name: str, config: Path) -> Callable[[], None]:
    """What `ray job stop` asks of the head, without its start-up, during which the training would go on."""
    program = "import sys; from ray.job_submission import JobSubmissionClient as Client; client = Client(sys.argv[1])"
    command = [
        sys.executable,
        "-u",
        "-c",
        f"{program}; print(1); input(); client.stop_job(sys.argv[2])",
        head.address,
        name,
    ]
    process = subprocess.Popen(command, env=head.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()  # it has imported and connected

    def stop() -> None:
        process.communicate(b"now\n", timeout=PATIENCE_S)
        assert process.returncode == 0

    return stop


def killer(head, name: str, config: Path) -> Callable[[], None]:
    """SIGKILL to the script itself, which has no chance to clean up after itself."""

    def kill() -> None:
        for process in psutil.Process(head.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:2] == [sys.executable, str(JOB)] and str(config) in process.cmdline():
                    return process.kill()
        raise AssertionError("the job's driver was not found")

    return kill


def trials_alive(head) -> list[str]:
    """Trial processes of the head's cluster that are still there after Ray had a minute to clean up."""
    deadline = time.monotonic() + 60
    while True:
        found = []
        for process in psutil.Process(head.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                found += [name for name in process.cmdline()[:1] if "run_stage" in name or "Func" in name]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
