"""A real disk that is too small: memory mounted as a file system, where this user may mount anything."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Disk:
    path: Path

    def remount(self, *options: str) -> list[str]:
        """The command that makes it larger, smaller or read-only."""
        return ["mount", "-o", ",".join(["remount", *options]), str(self.path)]


@contextlib.contextmanager
def mount(path: Path) -> Iterator[Disk | None]:
    """A disk of 16 MB; None where this user may not mount one."""
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "deco-ray-test", str(path)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield None
        return
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)
