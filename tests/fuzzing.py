"""What the fuzz tests share: how many cases there are, how a file is damaged, what a refusal must say.

In the suite a few hundred cases a target, the same every time; `make fuzz` sets DECO_RAY_FUZZ_EXAMPLES for more.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = "DECO_RAY_FUZZ_EXAMPLES"
fuzz = settings(
    max_examples=int(os.environ.get(LONG, "150")),
    deadline=None,
    database=None,
    derandomize=LONG not in os.environ,
    suppress_health_check=list(HealthCheck),
)
CHANGE = 9  # what, where (two bytes), how many of the six bytes that follow
# all changes of a case in one draw: hypothesis spends its time on draws, not on what it is asked to try
damage = st.binary(min_size=1 + 4 * CHANGE, max_size=1 + 4 * CHANGE)


def damaged(data: bytes, changes: bytes) -> bytes:
    """Up to four times: a byte changed, bytes cut out, bytes put in, or the rest cut off."""
    for number in range(changes[0] % 5):
        what, high, low, *extra = changes[1 + number * CHANGE :][:CHANGE]
        at = (256 * high + low) * len(data) // 65536
        piece = bytes(extra[: 1 + what // 4 % 6])
        if what % 4 == 0 and data:
            data = data[:at] + bytes([data[at] ^ (piece[0] or 1)]) + data[at + 1 :]
        elif what % 4 == 1:
            data = data[:at] + data[at + len(piece) :]
        elif what % 4 == 2:
            data = data[:at] + piece + data[at:]
        elif what % 4 == 3:
            data = data[:at]
    return data


def speaks(error: Exception, name: str = "") -> None:
    """A refusal says something, and where."""
    assert str(error)
    assert name in str(error)
