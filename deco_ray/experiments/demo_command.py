"""`deco-ray demo`: from nothing to a browsable result, the way a cluster is used: a head node and a submitted job."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from deco_ray.errors import DecoError

START_PATIENCE_S = 180
STARTS = 2  # Ray gives a node's agent 15 s, which cannot be set and which a busy machine exceeds now and then


def demo(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="deco-ray demo",
        description="Start a local Ray head, submit the main job on a small synthetic cohort, show the result.",
    )
    parser.add_argument("--config", default="configs/demo.yaml", help="default: %(default)s")
    parser.add_argument("--storage", default="runs", help="where everything is written; default: %(default)s")
    args = parser.parse_args(argv)
    job = Path("jobs/full_pipeline.py")
    if not job.is_file():
        raise DecoError(f"{job} is not here; run the demo from the project's folder")
    with Head() as head:
        command = ["job", "submit", "--address", head.address, "--", sys.executable, str(job)]
        command += ["--config", args.config, "--set", f"storage={args.storage}"]
        return subprocess.run([ray_program(), *command], env=head.env, check=False).returncode


class Head:
    """A Ray head of our own on free ports, with token authentication, stopped when the block ends."""

    def __init__(self, cpus: int | None = None) -> None:
        self.cpus = cpus

    def __enter__(self) -> Head:
        for _ in range(STARTS - 1):
            with contextlib.suppress(DecoError):
                return self._start()
        return self._start()

    def _start(self) -> Head:
        program = ray_program()
        self.folder = tempfile.mkdtemp(prefix="deco-ray-")  # apart from any other Ray on this machine
        self.port, self.dashboard = free_port(), free_port()
        self.address = f"http://127.0.0.1:{self.dashboard}"
        self.env = {
            **os.environ,
            "RAY_TMPDIR": self.folder,
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self.env.pop("RAY_ADDRESS", None)
        command = [program, "start", "--head", "--block", f"--port={self.port}", "--node-ip-address=127.0.0.1"]
        command += [f"--dashboard-port={self.dashboard}", "--dashboard-host=127.0.0.1", f"--temp-dir={self.folder}"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]  # its default is taken by any other Ray here
        command += [f"--num-cpus={self.cpus}"] if self.cpus else []
        ensure_token(self.env)
        with open(Path(self.folder) / "head.log", "w") as log:
            self.process = subprocess.Popen(command, env=self.env, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        answer = ""
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            # the API answers before the node's agent takes jobs: only a job that was taken shows that the head is up
            probe = [ray_program(), "job", "submit", "--no-wait", "--address", self.address, "--", "true"]
            done = subprocess.run(probe, env=self.env, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            answer = (done.stdout + done.stderr).strip()[-600:]
            time.sleep(0.5)
        tail = (Path(self.folder) / "head.log").read_text()[-600:]
        raise DecoError(
            f"the Ray head takes no jobs after {START_PATIENCE_S} s.\nIt said: {tail}\nAnd to a job: {answer}"
        )

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            self.process.terminate()
            for process in psutil.wait_procs(family, timeout=20)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def ensure_token(env: dict[str, str]) -> None:
    """Token authentication needs a token in the home folder before the head starts."""
    if env["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in env and "RAY_AUTH_TOKEN_PATH" not in env:
        path = Path.home() / ".ray" / "auth_token"
        if not path.exists():
            subprocess.run([ray_program(), "get-auth-token", "--generate"], env=env, capture_output=True, check=False)


def ray_program() -> str:
    """The `ray` of this environment, even when it is not on the PATH."""
    beside = Path(sys.executable).with_name("ray")
    found = str(beside) if beside.exists() else shutil.which("ray")
    if found is None:
        raise DecoError("the `ray` command is not installed; install the package with its dependencies")
    return found


def free_port() -> int:
    """Nobody listens there, and the system gives ports of this range to nobody who does not ask for them."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
