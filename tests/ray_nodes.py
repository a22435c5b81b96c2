"""A test cluster of several nodes on this machine; nodes can be lost and replaced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import psutil
import ray
from ray.cluster_utils import Cluster

STARTS = 3  # Ray gives a node's agent 15 s, which a busy machine exceeds now and then
T = TypeVar("T")


def started(start: Callable[[], T]) -> T:
    """What `start` starts, tried again where Ray was too slow."""
    for _ in range(STARTS - 1):
        with contextlib.suppress(Exception):  # Ray raises a bare one
            return start()
    return start()


class Nodes:
    """So many nodes behind a head that computes nothing, joined by this process."""

    def __init__(self, count: int, **each: Any) -> None:
        self.each, self.losing = each, threading.Lock()  # nodes may be lost from several threads
        head = {"num_cpus": 0, "object_store_memory": 80 * 2**20}
        self.cluster = started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.nodes = [self.add() for _ in range(count)]
        self.cluster._shutdown_at_exit = False  # successors join from threads, where Ray may set no signal handlers
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="error")
        self.cluster.wait_for_nodes()

    def add(self) -> Any:
        return started(lambda: self.cluster.add_node(**self.each))

    def lose(self, node: Any) -> None:
        """Kill all processes of a node at once."""
        self.nodes.remove(node)  # first: should its successor not start, nobody looks for this one again
        self.cluster.remove_node(node, allow_graceful=False)

    def replace_home_of(self, worker: int) -> None:
        """Kill the node on which this process works, and let another join."""
        with self.losing, contextlib.suppress(psutil.NoSuchProcess, StopIteration):  # lost already with another fault
            raylet = psutil.Process(worker).ppid()
            self.lose(next(node for node in self.nodes if node.all_processes["raylet"][0].process.pid == raylet))
            self.nodes.append(self.add())

    def shutdown(self) -> None:
        with self.losing:  # a delayed loss ends first
            self.nodes.clear()  # a later one finds none: Ray would start a head for its successor
            ray.shutdown()
            self.cluster.shutdown()
