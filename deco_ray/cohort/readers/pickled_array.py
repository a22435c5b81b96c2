"""A NumPy array in a bare pickle, rebuilt without running anything that the file names.

Only the four spellings by which pickle writes a numeric array are known here, each replaced by a function of ours
that builds numeric arrays and nothing else; every other name in the file is refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deco_ray.cohort.readers.raw import Unreadable

NUMERIC = {"f2", "f4", "f8", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


class _Kind:
    """Stands for `numpy.ndarray`: an argument that cannot be called."""


def _empty(kind: type, shape: tuple, code: object) -> np.ndarray:
    return np.ndarray.__new__(np.ndarray, (0,))


def _dtype(code: str, *_: object) -> np.dtype:
    if code not in NUMERIC:
        raise pickle.UnpicklingError(f"an array of {code!r}")
    return np.dtype(code, False, True)  # a copy: its state is set next


def _latin(text: str, encoding: str) -> bytes:
    return str.encode(text, "latin1")


def _from_buffer(data: bytes, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    return np.frombuffer(data, dtype).reshape(shape, order="F" if order == "F" else "C")


KNOWN: dict[tuple[str, str], Callable | type] = {
    ("numpy", "ndarray"): _Kind,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return KNOWN[module, name]


def load(path: Path) -> np.ndarray:
    """The array; anything else in the pickle is refused unopened."""
    try:
        content = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except Exception as error:  # damaged bytes make the unpickler fail in any way
        reason = str(error) or type(error).__name__
        raise Unreadable(
            f"a pickle that holds more than a numeric array, or is damaged ({reason}); it was not run, because a "
            "pickle can run code: save the features again as a bare tensor"
        ) from error
    if not isinstance(content, np.ndarray):
        raise Unreadable(f"a pickled {type(content).__name__}; expected an array")
    return content
