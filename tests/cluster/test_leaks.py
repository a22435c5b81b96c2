"""After a pipeline the cluster is as it was: every CPU free, no actor, no reservation, no temporary file."""

from __future__ import annotations

import io
import time

import pytest
from pipeline_site import leftovers, tiny_config

from deco_ray.experiments.board import Board
from deco_ray.experiments.pipeline import run_pipeline

PATIENCE_S = 60.0  # the promise: free again within a minute


def eventually(check) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def storage(ray_cluster, tiny_cohort, tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaks")
    settings = {"seeds": [0], "resources.scorers": 2, "anchors.backend": "sharded", "report.heatmaps": 0}
    run_pipeline(tiny_config(tiny_cohort.uri, folder, **settings), Board(io.StringIO()))
    return folder


def test_every_cpu_is_free_again(storage, ray_cluster):
    total = ray_cluster.cluster_resources()["CPU"]
    assert eventually(lambda: ray_cluster.available_resources().get("CPU", 0) == total)


def test_no_actor_of_ours_and_no_reservation_is_left(storage, ray_cluster):
    """Ray Data keeps one actor for statistics and one for its own bookkeeping; neither holds a CPU."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    def alive() -> set[str]:
        return {found["ActorClassName"] for found in actors().values() if found["State"] not in ("DEAD",)}

    assert eventually(lambda: alive() <= {"_StatsActor", "_AutoscalingCoordinatorActor", "AutoscalingRequester"}), (
        alive()
    )
    assert eventually(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))


def test_no_temporary_file_is_left(storage):
    assert leftovers(storage) == []
