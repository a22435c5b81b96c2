"""HDF5 files of any tool: opened safely, with errors that say what is wrong with the file."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from deco_ray.cohort.readers.raw import Unreadable

NUMBERS = (h5py.h5t.INTEGER, h5py.h5t.FLOAT)
# features lose a half to compression, sparse ones a few times that; only constants reach gzip's 1000 to 1
MOST_COMPRESSED = 100
ANY_COMPRESSION = 64 * 2**20  # bytes that any machine has: the coordinates of a regular grid compress very well


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


def member(file: h5py.File, name: str) -> h5py.Dataset | h5py.Group | h5py.Datatype | None:
    """What the file itself holds under this name, or none; what leads to data of other files is refused."""
    # asked before the link is followed: its other end can be any file of this machine
    outside = isinstance(file.get(name, getlink=True), h5py.ExternalLink)
    found = None if outside else file.get(name)
    if outside or (found is not None and _borrowed(found, file)):
        raise Unreadable(f"{name} lies in another file; a feature file must hold its own data: copy the data into it")
    return found


def _borrowed(found: h5py.Dataset | h5py.Group | h5py.Datatype, file: h5py.File) -> bool:
    """Whether this, or what it is made of, lies in another file."""
    if found.file.filename != file.filename:  # a soft link can lead through an external one
        return True
    return isinstance(found, h5py.Dataset) and (bool(found.external) or found.is_virtual)


def dataset(file: h5py.File, *names: str) -> h5py.Dataset:
    """The first of these datasets that is there; it holds numbers."""
    for name in names:
        found = member(file, name)
        if isinstance(found, h5py.Dataset):
            # looked at before anything is read: HDF5 itself can crash on damaged data of variable length
            if found.id.get_type().get_class() not in NUMBERS:
                raise Unreadable(f"the dataset {name} does not hold numbers")
            _check_stored(found, file)
            return found
    held = ", ".join(sorted(map(str, file))) or "nothing"  # a damaged name comes as bytes
    raise Unreadable(f"no dataset {' or '.join(names)} in the file, which holds {held}")


def _check_stored(found: h5py.Dataset, file: h5py.File) -> None:
    """Refuse a size that is only stated: HDF5 fills what nobody wrote, to any size, from a file of a kilobyte."""
    name = found.name.lstrip("/")
    if found.shape is None:
        raise Unreadable(f"the dataset {name} holds nothing, not even a shape; extract the slide again")
    stored = min(found.id.get_storage_size(), file.id.get_filesize())  # its parts can lie in the same place
    if found.nbytes and (not stored or found.nbytes > max(ANY_COMPRESSION, MOST_COMPRESSED * stored)):
        raise Unreadable(
            f"the dataset {name} of shape {found.shape} was not written, or only a small part of it: "
            f"the file holds {stored:,} bytes of its {found.nbytes:,}; extract the slide again"
        )


def array(file: h5py.File, name: str) -> np.ndarray | None:
    """The dataset in memory, or none if the file has no such dataset."""
    return dataset(file, name)[()] if isinstance(member(file, name), h5py.Dataset) else None


def numbers(owner: h5py.File | h5py.Dataset) -> dict[str, Any]:
    """Its attributes that are numbers, none at all where one is empty; whatever else there is has no use here."""
    kinds = {name: owner.attrs.get_id(name).get_type().get_class() for name in owner.attrs}
    found = {name: owner.attrs[name] for name, kind in kinds.items() if kind in NUMBERS}
    return {name: np.zeros(0) if isinstance(value, h5py.Empty) else value for name, value in found.items()}


def text(file: h5py.File, name: str) -> str:
    """An attribute of the file as text; empty where there is none."""
    if name not in file.attrs:
        return ""
    kind = file.attrs.get_id(name).get_type()
    if kind.get_class() != h5py.h5t.STRING:
        raise Unreadable(f"the attribute {name} is no text")
    if kind.is_variable_str():
        check_heaps(file)
    value = np.asarray(file.attrs[name]).reshape(-1)
    first = value[0] if value.size else ""
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)


def check_heaps(file: h5py.File) -> None:
    """Refuse damaged global heaps, where texts of any length lie: HDF5 goes round in them for ever.

    A heap is GCOL, a version, its size, and objects of a 16-byte header and data, one behind the other. An object of
    index 0 is what is free; its size counts the header, that of the others does not.
    """
    damaged = Unreadable("its texts are damaged; write the file again")
    if file.id.get_create_plist().get_sizes() != (8, 8):  # bytes of an address and of a length, as everybody has them
        raise damaged
    with open(file.filename, "rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = -1
        while (at := data.find(b"GCOL\x01", at + 1)) >= 0:
            end = at + int.from_bytes(data[at + 8 : at + 16], "little")
            if end > len(data):
                raise damaged
            here = at + 16
            while end - here >= 16:
                index, size = int.from_bytes(data[here : here + 2], "little"), data[here + 8 : here + 16]
                step = int.from_bytes(size, "little")
                here += step if index == 0 else 16 + -(-step // 8) * 8
                if here > end or (index == 0 and step < 16):
                    raise damaged
