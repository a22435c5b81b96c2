"""A .pt file: a tensor (CLAM), a pickled NumPy array (TRIDENT), or a dictionary around one; no code in it is run.

torch's restricted unpickler builds tensors and our stand-ins for NumPy's names, and refuses all else.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deco_ray.cohort.readers import pickled_array
from deco_ray.cohort.readers.raw import RawSlide, Unreadable, bag_features, number, pixel_coords

OLD_FORMAT = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")  # torch.save before version 1.6
MOST_PICKLE = 16 * 2**20  # bytes of data.pkl, which names a few tensors; their data are files of their own
FEATURES = ("features", "feats", "feature", "embeddings", "x")
COORDS = ("coords", "coordinates")


def read(path: Path) -> RawSlide:
    content = load(path)
    coords, size = None, None
    if isinstance(content, dict):
        coords = next((content[name] for name in COORDS if content.get(name) is not None), None)
        size = number(content.get("patch_size_level0"))
        content = _features_of(content)
    most = path.stat().st_size
    features = bag_features(_array(content, most))
    return RawSlide(features, None if coords is None else pixel_coords(_array(coords, most), len(features)), size)


def load(path: Path) -> Any:
    head = _head(path)
    if head.startswith(b"\x80") and OLD_FORMAT not in head:  # neither torch's zip archive nor its older stream
        return pickled_array.load(path)
    try:
        _check_pickle(path, head)
        with torch.serialization.safe_globals([(stand_in, name) for name, stand_in in pickled_array.KNOWN.items()]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=head.startswith(b"PK"))
    except pickle.UnpicklingError as error:
        names = re.findall(r"GLOBAL ([\w.]+)", str(error))
        raise Unreadable(
            f"holds more than arrays{f' ({names[0]})' if names else ', or is damaged'}; it was not opened, because a "
            "pickle can run code: save the features again as a bare tensor"
        ) from error
    except Exception as error:  # damaged bytes make the loader fail in any way, an assertion included
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unreadable(f"truncated or not a PyTorch file ({first})") from error


def _check_pickle(path: Path, head: bytes) -> None:
    """Refuse what torch's unpickler gives memory of any size for: a bytearray of a stated length, a packed pickle."""
    if head.startswith(b"PK"):
        with zipfile.ZipFile(path) as archive:
            pickles = [item for item in archive.infolist() if item.filename.endswith("data.pkl")]
            if any(item.file_size > MOST_PICKLE for item in pickles):
                raise pickle.UnpicklingError("a description larger than any of arrays")
            for item in pickles:
                item.CRC = None  # type: ignore[assignment]  # torch can be told to write none
            described = b"".join(map(archive.read, pickles))
    else:
        described = path.read_bytes()  # its data stands between the pickles
    if b"bytearray" in described:
        raise pickle.UnpicklingError("GLOBAL builtins.bytearray")


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(32)
    except OSError as error:
        raise Unreadable(f"cannot be opened ({error.strerror})") from error


def _features_of(content: dict) -> Any:
    for name in FEATURES:
        if content.get(name) is not None:
            return content[name]
    bags = [value for value in content.values() if getattr(value, "ndim", 0) == 2]
    if len(bags) != 1:
        raise Unreadable(f"a dictionary with {', '.join(map(str, content)) or 'nothing'}; expected `features`")
    return bags[0]


def _array(value: Any, file_bytes: int) -> np.ndarray:
    if isinstance(value, pickled_array.Array):
        return value.found
    if not isinstance(value, torch.Tensor):
        raise Unreadable(f"holds a {type(value).__name__}; expected a tensor or an array")
    try:
        size = value.numel() * value.element_size()
        if size > file_bytes:  # rows that repeat one stored row, or memory that nothing was stored for
            raise Unreadable(
                f"holds a tensor of shape {tuple(value.shape)}, {size:,} bytes, in a file of {file_bytes:,}; "
                "save the features themselves (expanded ones with `.clone()`)"
            )
        value = value.detach()
        return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    except (TypeError, RuntimeError) as error:
        raise Unreadable(f"holds a tensor of a kind that has no plain array ({error}); save it dense") from error
