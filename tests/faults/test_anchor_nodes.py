"""Anchors on three nodes, one of which is lost in the middle: the bits of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from deco_ray.anchors.kmeans import CHUNK, fit
from deco_ray.keys import generator

# a cluster of its own needs a process of its own: the session's local Ray may be running in this one
SCRIPT = """
import json, sys
import numpy as np
from ray_nodes import Nodes
from deco_ray.anchors import kmeans
from deco_ray.anchors.lloyd import lloyd
from deco_ray.anchors.sharded import ShardedScanner

pool, out = sys.argv[1:]
nodes = Nodes(3, num_cpus=2)
start = kmeans.start(kmeans.open_rows(pool), 20, 0)
with ShardedScanner(pool, 3) as scanner:
    homes = {process["node"] for process in scanner.processes()}
    whole = lloyd(scanner, start, 4)
    scan, scans = scanner.scan, []

    def loses_a_node(centroids):
        scans.append(1)
        if len(scans) == 3:
            nodes.lose(nodes.nodes[0])
        return scan(centroids)

    scanner.scan = loses_a_node
    damaged = lloyd(scanner, start, 4)
    left = {process["node"] for process in scanner.processes()}
np.savez(out, whole=whole.centroids, damaged=damaged.centroids)
print(json.dumps({"before": sorted(homes), "after": sorted(left)}))
nodes.shutdown()
"""


@pytest.mark.timeout(1000)
def test_three_nodes_and_the_loss_of_one_change_no_bit(tmp_path):
    rng = generator(0, "pool of three nodes")
    rows = rng.normal(size=(4 * CHUNK + 1000, 16)) + 0.5
    pool = tmp_path / "pool.npy"
    np.save(pool, (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))
    command = [sys.executable, "-c", SCRIPT, str(pool), str(tmp_path / "out.npz")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    homes = json.loads(run.stdout.strip().splitlines()[-1])
    assert len(homes["before"]) == 3
    assert len(homes["after"]) == 2
    expected = fit(pool, 20, iterations=4).centroids.tobytes()
    found = np.load(tmp_path / "out.npz")
    assert found["whole"].tobytes() == expected
    assert found["damaged"].tobytes() == expected
