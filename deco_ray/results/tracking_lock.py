"""Drivers that share a storage folder take turns at what MLflow has of their runs."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LOCK_TIMEOUT_S = 60.0  # a driver that was put to sleep (Ctrl-Z) keeps its lock; no training waits for it to wake up


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; where nothing can be locked, everyone; a TimeoutError where one never lets go."""
    with contextlib.ExitStack() as stack:
        lock: IO[str] | None = None
        with contextlib.suppress(OSError):
            lock = stack.enter_context(open(path, "a"))
        until = time.monotonic() + LOCK_TIMEOUT_S
        while lock is not None and not _locks(lock):
            if time.monotonic() > until:
                raise TimeoutError(f"another command has held {path} for {LOCK_TIMEOUT_S:g} s; is it suspended?")
            time.sleep(0.01)
        yield


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
