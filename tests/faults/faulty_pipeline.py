"""Run as a program: pipelines in a row on a Ray of their own, with the faults each asks for.

The one argument is JSON:
{"nodes": 0 or how many, "cpus": ..., "store_mb": ...,
 "acts": [{"before": [a command], "config": {...}, "faults": [...]}]}.
A fault strikes when its stage reports its `at`-th result. A trial waits until its report was heard, so the
moment is exact however slow the machine is; `delay` seconds later is the only random part (chaos).
One line of JSON per act goes to standard output.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("RAY_health_check_period_ms", "1000")  # a lost node is noticed in seconds, not in half a minute

sys.path.insert(0, str(Path(__file__).parents[1]))

import ray
from ray_nodes import Nodes

from deco_ray.cluster import start_ray
from deco_ray.config import Config
from deco_ray.errors import DecoError
from deco_ray.experiments import study
from deco_ray.experiments.board import Board
from deco_ray.experiments.pipeline import run_pipeline
from deco_ray.experiments.schedule import Workplace
from deco_ray.experiments.stages import Stage


class Both:
    """What is said is kept for the result and shown at once, so that a run that hangs has said where."""

    def __init__(self, *outs: TextIO) -> None:
        self.outs = outs

    def write(self, text: str) -> None:
        for out in self.outs:
            out.write(text)

    def flush(self) -> None:
        for out in self.outs:
            out.flush()


class Saboteur(Board):
    """A board that also strikes: the driver itself (killed or interrupted), the process of a trial, or its node."""

    def __init__(self, out: io.StringIO, faults: list[dict[str, Any]], nodes: Nodes | None) -> None:
        super().__init__(Both(out, sys.stderr))
        self.faults, self.nodes = list(faults), nodes
        self.starts: Counter[str] = Counter()
        self.reports: Counter[str] = Counter()
        self.struck: list[dict[str, Any]] = []

    def started(self, stage: Stage) -> None:
        super().started(stage)
        self.starts[stage.title] += 1

    def advanced(self, stage: Stage, metrics: dict[str, Any]) -> None:
        super().advanced(stage, metrics)
        self.reports[stage.title] += 1
        for fault in [fault for fault in self.faults if fault["stage"] == stage.title]:
            if self.reports[stage.title] >= fault["at"]:
                self.faults.remove(fault)
                self.struck.append(fault)
                print(f"strike {json.dumps(fault)}", file=self.out, flush=True)
                if fault.get("delay"):
                    threading.Timer(fault["delay"], self.strike, (fault["what"], metrics["pid"])).start()
                else:
                    self.strike(fault["what"], metrics["pid"])

    def strike(self, what: str, worker: int) -> None:
        if what == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif what == "node" and self.nodes is not None:
            self.nodes.replace_home_of(worker)
        else:
            with contextlib.suppress(ProcessLookupError):  # a delayed strike may come after the trial's end
                os.kill(worker, signal.SIGKILL)


def perform(act: dict[str, Any], nodes: Nodes | None) -> dict[str, Any]:
    out, warned = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(warned)
    logging.getLogger("deco_ray").addHandler(handler)
    board = Saboteur(out, act.get("faults", []), nodes)
    begun, failures, error = time.monotonic(), {}, ""
    try:
        failures = run_pipeline(Config.model_validate(act["config"]), board).failures
    except DecoError as problem:
        error = str(problem)
    finally:
        logging.getLogger("deco_ray").removeHandler(handler)
    return {
        "seconds": time.monotonic() - begun,
        "failures": failures,
        "error": error,
        "starts": board.starts,
        "struck": board.struck,
        "said": out.getvalue(),
        "warned": warned.getvalue(),
    }


def main() -> None:
    study.Workplace = functools.partial(Workplace, report_every_s=0.0)  # each epoch by itself: faults count reports
    play = json.loads(sys.argv[1])
    store = play.get("store_mb", 200)
    each = {"object_store_memory": store * 2**20}
    nodes = Nodes(play["nodes"], num_cpus=1, **each) if play.get("nodes") else None
    if nodes is None:
        start_ray(num_cpus=play.get("cpus", 2), include_dashboard=False, **each)
    for act in play["acts"]:
        if "before" in act:
            subprocess.run(act["before"], check=True)
        print(json.dumps(perform(act, nodes)), flush=True)
    if nodes is not None:
        nodes.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
