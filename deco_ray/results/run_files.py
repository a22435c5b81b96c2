"""What a finished run left in its artefact folder, read back; a damaged file says which folder to remove."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from deco_ray.artefacts import read_file
from deco_ray.errors import DecoError


def read_metrics(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.json"
    with _explaining(path):
        found = json.loads(read_file(path))
        if not isinstance(found, dict):
            raise ValueError("it holds no metrics")
        return found


def read_frame(path: Path) -> pd.DataFrame:
    """history.parquet or predictions.parquet of a run."""
    with _explaining(path):
        return pd.read_parquet(io.BytesIO(read_file(path)))


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DecoError(
            f"{path} is damaged: {error}; remove {path.parent} and run the same command again to make it again"
        ) from error
