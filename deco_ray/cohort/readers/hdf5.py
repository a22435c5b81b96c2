"""HDF5 files of any tool: opened safely, with errors that say what is wrong with the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np

from deco_ray.cohort.readers.raw import Unreadable


@contextlib.contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r", locking=False) as file:  # shared read-only storage often cannot lock
            yield file
    except FileNotFoundError:
        raise Unreadable("the file has vanished") from None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        # h5py finds what is wrong with damaged bytes wherever it stumbles over them
        raise Unreadable(f"truncated or not an HDF5 file ({error})") from error


def dataset(file: h5py.File, *names: str) -> h5py.Dataset:
    """The first of these datasets that is there."""
    for name in names:
        if isinstance(file.get(name), h5py.Dataset):
            return file[name]
    # a damaged name comes as bytes or with surrogates, which no terminal prints
    held = ", ".join(sorted(str(key).encode("utf-8", "backslashreplace").decode() for key in file)) or "nothing"
    raise Unreadable(f"no dataset {' or '.join(names)} in the file, which holds {held}")


def array(file: h5py.File, name: str) -> np.ndarray | None:
    """The dataset in memory, or none if the file has no such dataset."""
    return file[name][()] if isinstance(file.get(name), h5py.Dataset) else None
