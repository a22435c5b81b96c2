"""What a person sees while it runs: one line per finished stage, and now and then what is running and how long yet."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from typing import Any, TextIO

from deco_ray.experiments.stages import Stage, TrainStage

EVERY_S = 10.0  # between lines about running stages; `ray job logs` shows them as they come


class Board:
    def __init__(self, out: TextIO | None = None) -> None:
        self.total, self.side_by_side = 0, 1
        self.out = out or sys.stdout
        self.begun = time.monotonic()
        self.last_line = self.begun
        self.running: dict[str, tuple[Stage, float, dict[str, Any]]] = {}  # digest -> stage, start, last report
        self.seconds: dict[str, list[float]] = defaultdict(list)  # kind of stage -> durations
        self.ahead: dict[str, int] = defaultdict(int)  # kind of stage -> how many are not finished
        self.done = 0

    def expect(self, stages: list[Stage]) -> None:
        for stage in stages:
            self.ahead[sort_of(stage)] += 1

    def say(self, text: str) -> None:
        print(f"[{clock(time.monotonic() - self.begun):>8}] {text}", file=self.out, flush=True)
        self.last_line = time.monotonic()

    def stage(self, title: str, detail: str, seconds: float | None = None, reused: bool = False) -> None:
        """The line of a finished stage: what it was, what came out, how long it took or that it was there already."""
        took = "reused" if reused else (clock(seconds) if seconds is not None else "")
        self.say(f"{title:<26} {detail:<44} {took:>8}".rstrip())

    # what Tune's callback tells

    def started(self, stage: Stage) -> None:
        self.running[stage.digest] = (stage, time.monotonic(), {})

    def advanced(self, stage: Stage, metrics: dict[str, Any]) -> None:
        _, start, before = self.running.get(stage.digest, (stage, time.monotonic(), {}))
        best = max(before.get("best", 0.0), metrics.get("val_macro_f1", 0.0))
        self.running[stage.digest] = (stage, start, {**metrics, "best": best, "done": metrics.get("epoch", -1) + 1})
        if time.monotonic() - self.last_line > EVERY_S:
            self.say(self.now())

    def finished(self, stage: Stage, seconds: float) -> None:
        _, start, metrics = self.running.pop(stage.digest, (stage, time.monotonic(), {}))
        took = time.monotonic() - start
        self.seconds[sort_of(stage)].append(took)
        self.ahead[sort_of(stage)] -= 1
        self.done += 1
        self.stage(f"[{self.done}/{self.total}] {stage.title}", outcome(stage, metrics), took)

    def failed(self, stage: Stage, why: str) -> None:
        self.running.pop(stage.digest, None)
        self.ahead[sort_of(stage)] -= 1
        self.done += 1
        self.say(f"[{self.done}/{self.total}] {stage.title} FAILED: {why}")

    def now(self) -> str:
        parts = [describe(stage, metrics) for stage, _, metrics in self.running.values()]
        left = self.time_left()
        return f"running: {', '.join(parts)}" + (f" | about {clock(left)} left" if left is not None else "")

    def time_left(self) -> float | None:
        """From the mean duration of each kind so far; unknown kinds count as the dearest known one."""
        known = {kind: sum(values) / len(values) for kind, values in self.seconds.items()}
        if not known:
            return self._from_epochs()
        work = sum(count * known.get(kind, max(known.values())) for kind, count in self.ahead.items())
        spent = sum(time.monotonic() - start for _, start, _ in self.running.values())
        return max(0.0, work - spent) / self.side_by_side

    def _from_epochs(self) -> float | None:
        """Before the first stage ends: what the running ones have left, from their epochs."""
        estimates = []
        for stage, start, metrics in self.running.values():
            if isinstance(stage, TrainStage) and metrics.get("done"):
                estimates.append((time.monotonic() - start) * stage.spec.epochs / metrics["done"])
        if not estimates:
            return None
        one = sum(estimates) / len(estimates)
        spent = sum(time.monotonic() - start for _, start, _ in self.running.values())
        trainings = sum(count for kind, count in self.ahead.items() if kind != "contributions")
        return max(0.0, trainings * one - spent) / self.side_by_side


def sort_of(stage: Stage) -> str:
    return f"{stage.spec.kind} {stage.spec.model.name}" if isinstance(stage, TrainStage) else stage.kind


def describe(stage: Stage, metrics: dict[str, Any]) -> str:
    if isinstance(stage, TrainStage):
        return f"{stage.title} epoch {metrics.get('done', 0)}/{stage.spec.epochs}"
    return f"{stage.title} {metrics.get('slides_scored', 0)}/{metrics.get('slides', '?')} slides"


def outcome(stage: Stage, metrics: dict[str, Any]) -> str:
    if isinstance(stage, TrainStage):
        score = f", best val macro-F1 {100 * metrics['best']:.1f} %" if "best" in metrics else ""
        return f"{metrics.get('done', stage.spec.epochs)} epochs{score}"
    return f"{metrics.get('slides', 0)} slides scored"


def clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
