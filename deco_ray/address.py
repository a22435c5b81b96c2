"""Where a Ray cluster is, and whether anybody listens there; without importing Ray."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path


def ray_address(environ: Mapping[str, str]) -> str | None:
    """Where `ray.init()` would look for a running cluster; read from Ray's own note, without importing Ray."""
    given = environ.get("RAY_ADDRESS")
    if given and given not in ("auto", "local"):
        return given.split("://")[-1]
    note = Path(environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        return note.read_text().strip() or None
    except OSError:
        return None


def reachable(address: str, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s):
            return True
    except (OSError, ValueError):
        return False
