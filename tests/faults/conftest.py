"""A real disk that is too small: memory mounted as a file system, where this user may mount anything."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    path: Path

    def remount(self, *options: str) -> list[str]:
        """The command that makes it larger, smaller or read-only."""
        return ["mount", "-o", ",".join(["remount", *options]), str(self.path)]


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    """A disk of 16 MB; None where this user may not mount one."""
    path = tmp_path_factory.mktemp("disk")
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "deco-ray-test", str(path)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def disk(mounted) -> Disk:
    if mounted is None:
        pytest.skip("this user may not mount a small disk")
    return mounted
