"""Shared by all tests: a tiny cohort on disk, one local Ray cluster for a whole session, and what none may leave."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny matrices: a second thread only waits, and workers inherit it
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # processes that nobody asks for: one in five
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import time
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from small_disk import Disk, mount

from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.experiments.demo_command import ensure_token
from deco_ray.keys import generator


def pytest_configure(config) -> None:
    """Ray's token is made once, before two processes of the suite make one each."""
    if not hasattr(config, "workerinput"):
        ensure_token({**os.environ, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token")})


def write_tiny_cohort(path, *, slides=(12, 9, 8), dim=16, patches=(20, 60), coords=True, seed=0) -> Cohort:
    """Three classes on a narrow cone; lesion patches point along their class's own axis."""
    rng = generator(seed, "tiny cohort")
    meta = CohortMeta(name="tiny", classes=tuple("abcdef"[: len(slides)]), normal_class=0, dim=dim)
    with CohortWriter(path, meta) as writer:
        for label, count in enumerate(slides):
            for index in range(count):
                n = int(rng.integers(*patches))
                features = rng.normal(0, 0.3, (n, dim)).astype(np.float32) + 0.2
                if label:
                    features[: max(2, n // 6), label] += 2.5
                grid = np.stack([np.arange(n) % 8, np.arange(n) // 8], 1) * 512 if coords else None
                writer.add(
                    SlideFeatures(
                        f"s{label}_{index:03d}", f"case{label}_{index // 2}", label, features, grid, 512.0, 8192, 8192
                    )
                )
    return Cohort.open(str(path))


@pytest.fixture(scope="session")
def tiny_cohort(tmp_path_factory) -> Cohort:
    return write_tiny_cohort(tmp_path_factory.mktemp("cohorts") / "tiny")


@pytest.fixture(scope="module")
def mounted(tmp_path_factory):
    with mount(tmp_path_factory.mktemp("disk")) as found:
        yield found


@pytest.fixture
def disk(mounted) -> Disk:
    if mounted is None:
        pytest.skip("this user may not mount a small disk")
    return mounted


@pytest.fixture(scope="session")
def ray_cluster():
    """One local Ray for the whole session; never joins a cluster that happens to run on the machine."""
    import ray

    from deco_ray.cluster import start_ray

    before = set(psutil.Process().children(recursive=True))
    start_ray(num_cpus=2, object_store_memory=400 * 2**20, include_dashboard=False)
    started = set(psutil.Process().children(recursive=True)) - before
    yield ray
    gc.collect()  # no fixture holds features any more
    eventually(lambda: shared_bytes(ray) < 2**20, "features in shared memory")
    ray.shutdown()
    eventually(lambda: not [process for process in started if lives(process)], "processes of Ray")


def shared_bytes(ray) -> float:
    name = "object_store_memory"
    return ray.cluster_resources()[name] - ray.available_resources().get(name, 0)


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def the_same_numbers():
    """Torch's own draws do not depend on which tests ran before in this process."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_leaks(request):
    """After each test on the session's Ray: every CPU free, no actor and no reservation left."""
    yield
    if "ray_cluster" in request.fixturenames:
        ray = request.getfixturevalue("ray_cluster")
        eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], "CPUs in use")
        eventually(lambda: alive_actors() <= RAY_DATAS_OWN, "actors")
        groups = ray.util.placement_group_table
        eventually(lambda: all(group["state"] == "REMOVED" for group in groups().values()), "placement groups")


# Ray Data keeps these for its statistics and bookkeeping; none holds a CPU
RAY_DATAS_OWN = {"_StatsActor", "_AutoscalingCoordinatorActor", "AutoscalingRequester"}


def alive_actors() -> set[str]:
    from ray._private.state import actors

    return {found["ActorClassName"] for found in actors().values() if found["State"] != "DEAD"}


def eventually(check: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Ray cleans up behind the caller's back; within the minute that is promised it must be done."""
    end = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < end, f"left behind: {what}"
        time.sleep(0.1)
