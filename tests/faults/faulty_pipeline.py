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
from typing import Any, TextIO

os.environ.setdefault("RAY_health_check_period_ms", "1000")  # a lost node is noticed in seconds, not in half a minute

import psutil
import ray
from ray.cluster_utils import Cluster

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


class Nodes:
    """A cluster of one-CPU nodes behind a head that computes nothing; nodes can be lost and replaced."""

    def __init__(self, count: int, store_mb: int) -> None:
        self.store, self.losing = store_mb * 2**20, threading.Lock()  # delayed strikes come from threads of their own
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
        self.nodes = [self.add() for _ in range(count)]
        self.cluster._shutdown_at_exit = False  # successors join from threads, where Ray may set no signal handlers
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")
        self.cluster.wait_for_nodes()

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=self.store)

    def lose(self, worker: int) -> None:
        """Kill the node on which this process works, all at once, and let another join."""
        with self.losing, contextlib.suppress(psutil.NoSuchProcess, StopIteration):  # lost already with another fault
            raylet = psutil.Process(worker).ppid()
            lost = next(node for node in self.nodes if node.all_processes["raylet"][0].process.pid == raylet)
            self.nodes.remove(lost)  # first: should its successor not start, nobody looks for this one again
            self.cluster.remove_node(lost, allow_graceful=False)
            self.nodes.append(self.add())


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
            self.nodes.lose(worker)
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
    nodes = Nodes(play["nodes"], store) if play.get("nodes") else None
    if nodes is None:
        ray.init(
            address="local",
            num_cpus=play.get("cpus", 2),
            object_store_memory=store * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
    for act in play["acts"]:
        if "before" in act:
            subprocess.run(act["before"], check=True)
        print(json.dumps(perform(act, nodes)), flush=True)
    ray.shutdown()
    if nodes is not None:
        nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
