"""Randomness from counter-based keys: a draw depends on what it is for, never on who draws it or when.

Every random choice names itself, `generator(seed, "reduce", epoch, slide_id, visit)`, so that any number
of workers, any order of arrival and any resume give the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np

Part = int | str


def key(*parts: Part) -> int:
    """A 128-bit key; parts of different types or grouping never collide."""
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def generator(*parts: Part) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(*parts)))


def torch_seed(*parts: Part) -> int:
    """A seed for `torch.manual_seed` (63 bits: torch takes signed 64)."""
    return key(*parts) & (2**63 - 1)
