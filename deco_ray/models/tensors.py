"""Tensors in one file: written whole, and read only as they were written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from deco_ray.artefacts import write_atomically


def save_tensors(path: Path, content: dict[str, Any]) -> None:
    """Through memory: torch's own writer turns a full disk into a RuntimeError that names neither disk nor reason."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load_tensors(path: Path) -> Any:
    """What was saved, on the CPU; a ValueError for a file with as much as one changed bit."""
    data = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()  # torch stores these sums and does not look at them
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error
    if damaged is not None:
        raise ValueError(f"its entry {damaged} is not what was written")
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
