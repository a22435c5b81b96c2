"""What a finished run left in its artefact folder, read back; a damaged file says which folder to remove."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from deco_ray.errors import DecoError


def read_metrics(folder: Path) -> dict[str, Any]:
    path = folder / "metrics.json"
    with _explaining(path):
        return json.loads(path.read_text())


def read_frame(path: Path) -> pd.DataFrame:
    """history.parquet or predictions.parquet of a run."""
    with _explaining(path):
        return pd.read_parquet(path)


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DecoError(
            f"{path} is damaged: {error}; remove {path.parent} and run the same command again to make it again"
        ) from error
