"""Real servers for a test: started on a free loopback port, waited for, and ended with all their workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from deco_ray.results.ui import server_environment

PATIENCE_S = 200  # seconds on an idle machine, minutes on one that runs everything at once


@contextlib.contextmanager
def running(command: list[str], health: str, log: Path, **environment: str) -> Iterator[None]:
    """A server as long as the block lasts, from the moment it answers."""
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command, env={**server_environment(), **environment}, stdout=output, stderr=output, start_new_session=True
        )
    try:
        until = time.monotonic() + PATIENCE_S
        while not answers(health):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, f"no answer in {PATIENCE_S} s: {log.read_text()[-3000:]}"
            time.sleep(0.2)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # the session of the server and its workers, nobody else's
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
