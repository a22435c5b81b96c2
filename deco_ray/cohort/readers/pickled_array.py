"""A NumPy array in a pickle, rebuilt without running anything that the file names.

Pickle spells a numeric array with a few names of NumPy's. Each has a stand-in here that checks what it is given;
NumPy's own would take a damaged state for granted and crash. Every other name is refused before it is looked up.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from deco_ray.cohort.readers.raw import Unreadable

MOST_STEPS = 200  # of a pickle; NumPy spells an array in 49 to 65, whatever its size
NUMERIC = {"f2", "f4", "f8", "i2", "i4", "i8", "u1", "u2", "u4", "u8"}


class StandIn:
    """For a name that a pickle may hold; a state it gives to anything but a fresh array or dtype is refused."""

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a state where none belongs")


class Kind(StandIn):
    """`numpy.ndarray`, which is only ever an argument."""


class DType(StandIn):
    """`numpy.dtype`: a number's code, then its byte order."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in NUMERIC:
            raise pickle.UnpicklingError(f"an array of {code!r}")
        self.found = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError(f"byte order {state[1]!r}")
        self.found = self.found.newbyteorder(state[1])


class Array(StandIn):
    """`numpy._core.multiarray._reconstruct`: an empty array, then its shape, dtype and bytes."""

    def __init__(self, *_: object) -> None:
        self.found = np.empty(0, np.float32)

    @property
    def ndim(self) -> int:
        return self.found.ndim

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.found = filled(data, dtype, shape, "F" if fortran else "C")


class FromBuffer(StandIn):
    """`numpy._core.numeric._frombuffer`, which newer pickles use instead."""

    def __new__(cls, data: Any, dtype: DType, shape: Any, order: Any) -> Any:
        found = Array()
        found.found = filled(data, dtype, shape, order)
        return found


class Latin(StandIn):
    """`_codecs.encode`: how older pickles spell bytes."""

    def __new__(cls, text: str, encoding: str) -> Any:
        return str.encode(text, "latin1")


def filled(data: Any, dtype: DType, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, DType) or not isinstance(data, bytes | bytearray):
        raise pickle.UnpicklingError("an array without a dtype or bytes")
    return np.frombuffer(data, dtype.found).reshape(shape, order="F" if order == "F" else "C")


KNOWN: dict[str, type[StandIn]] = {
    "numpy.ndarray": Kind,
    "numpy.dtype": DType,
    "_codecs.encode": Latin,
    **{f"numpy.{core}.multiarray._reconstruct": Array for core in ("core", "_core")},  # NumPy 1 wrote `core`
    **{f"numpy.{core}.numeric._frombuffer": FromBuffer for core in ("core", "_core")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in KNOWN:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return KNOWN[f"{module}.{name}"]


def check_steps(data: bytes) -> None:
    """Refuse more steps than an array takes, and lengths or memo places that the pickle only states.

    The unpickler makes room for whatever is stated: nine bytes that put something in place 2^32 take 64 GB.
    """
    for number, (step, argument, _) in enumerate(pickletools.genops(data)):  # which reads no more than there is
        place = (argument or 0) if step.name in ("PUT", "BINPUT", "LONG_BINPUT") else 0
        if max(number, place) >= MOST_STEPS:
            raise pickle.UnpicklingError("more steps than an array has")


def load(path: Path) -> Array:
    """The array; anything else in the pickle is refused unopened."""
    try:
        data = path.read_bytes()
        check_steps(data)
        content = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes make the unpickler fail in any way
        reason = str(error) or type(error).__name__
        raise Unreadable(
            f"a pickle that holds more than a numeric array, or is damaged ({reason}); it was not run, because a "
            "pickle can run code: save the features again as a bare tensor"
        ) from error
    if not isinstance(content, Array):
        raise Unreadable(f"a pickled {type(content).__name__}; expected an array")
    return content
