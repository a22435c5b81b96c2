"""Progress that reads well twice: a bar on a terminal, one line now and then in a job's log."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
LOG_INTERVAL_S = 10.0  # a job log is read afterwards: a line every ten seconds tells enough


def bar(total: int | None, label: str, unit: str = "it", **options: Any) -> tqdm:
    """A tqdm bar (none without a label); where nobody watches a terminal, a fresh line every few seconds."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=label,
        unit=unit,
        disable=not label or os.environ.get("DECO_RAY_PROGRESS") == "0",
        mininterval=0.2 if terminal else LOG_INTERVAL_S,
        maxinterval=0.2 if terminal else LOG_INTERVAL_S,
        ascii=None if terminal else " .oO",
        ncols=None if terminal else 100,
        file=sys.stderr if terminal else _Lines(),
        leave=True,
        **options,
    )


def track(items: Iterable[Item], total: int | None = None, label: str = "", unit: str = "it") -> Iterator[Item]:
    if total is None and isinstance(items, Sized):
        total = len(items)
    with bar(total, label, unit) as shown:
        for item in items:
            yield item
            shown.update()


class _Lines:
    """Turns tqdm's carriage returns into lines, so that a log file stays readable."""

    def write(self, text: str) -> None:
        text = text.strip("\r\n")
        if text.strip():
            print(text, file=sys.stderr, flush=True)

    def flush(self) -> None:
        sys.stderr.flush()
