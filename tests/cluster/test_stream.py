"""Streams of bags: the manifest's order, the reader's own errors, a bounded memory, no CPU needed."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from ray.experimental import internal_kv

from deco_ray.cohort import stream
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Bag, Cohort
from deco_ray.cohort.stream import blocks, map_bags, stream_bags
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.errors import CohortError, ModelError, StageError
from deco_ray.keys import generator


@pytest.fixture(scope="module")
def wide_cohort(tmp_path_factory) -> Cohort:
    """30 slides of 8 MB: more than half of the tests' object store."""
    path = tmp_path_factory.mktemp("stream") / "wide"
    with CohortWriter(path, CohortMeta(name="wide", classes=("a",), dim=512)) as writer:
        for index in range(30):
            features = np.full((4000, 512), 1.0, np.float32)
            features[:, 0] = index + 1
            writer.add(SlideFeatures(f"w{index}", "c", 0, features))
    return Cohort.open(str(path))


def unimportable(bag: Bag) -> dict[str, np.ndarray]:
    """Workers cannot import this module, so this function does not reach them."""
    return {}


def test_bags_come_in_the_order_asked_for_with_repeats(ray_cluster, tiny_cohort, capsys):
    ids = list(tiny_cohort.slides["slide_id"])
    order = [ids[i] for i in generator(0, "order").integers(0, len(ids), 80)]
    for slide, bag in zip(order, stream_bags(tiny_cohort, order), strict=True):
        expected = tiny_cohort.bag(slide)
        assert bag.slide_id == slide
        assert bag.label == expected.label
        assert torch.equal(bag.features, expected.features)
        np.testing.assert_array_equal(bag.coords, expected.coords)
        bag.features.zero_()  # a bag is the receiver's own
    assert list(stream_bags(tiny_cohort, [])) == []
    assert "Execution plan" not in "".join(capsys.readouterr())
    levels = [h.level for h in logging.getLogger("ray.data").handlers if type(h).__name__ == "PlainRayHandler"]
    assert levels
    assert min(levels) >= logging.ERROR


def test_functions_run_beside_the_read(ray_cluster, tiny_cohort):
    def total(bag: Bag) -> dict[str, np.ndarray]:
        return {"total": bag.features.sum(0).numpy(), "patches": np.array(len(bag.features))}

    ids = list(tiny_cohort.slides["slide_id"])[::-1]
    received = list(map_bags(tiny_cohort, ids, total))
    assert [slide for slide, _ in received] == ids
    for slide, arrays in received:
        np.testing.assert_array_equal(arrays["total"], total(tiny_cohort.bag(slide))["total"])
        assert arrays["patches"] == len(tiny_cohort.bag(slide).features)


def test_a_pass_over_many_blocks_runs_in_windows(ray_cluster, tiny_cohort, monkeypatch):
    monkeypatch.setattr(stream, "WINDOW", 3)
    ids = list(tiny_cohort.slides["slide_id"])
    assert len(list(blocks(tiny_cohort, ids))) > 6
    assert [bag.slide_id for bag in stream_bags(tiny_cohort, ids)] == ids


def test_blocks_depend_on_the_data_only(tiny_cohort, monkeypatch):
    ids = list(tiny_cohort.slides["slide_id"])
    found = list(blocks(tiny_cohort, ids))
    assert [slide for block in found for slide in block] == ids
    assert len(found) >= 8
    with pytest.raises(CohortError, match="slide 'zzz' is not in cohort tiny"):
        list(blocks(tiny_cohort, ["zzz"]))


def test_errors_arrive_as_what_they_were_and_name_the_slide(ray_cluster, tiny_cohort, tmp_path):
    ids = list(tiny_cohort.slides["slide_id"])

    def refuse(bag: Bag) -> dict[str, np.ndarray]:
        if bag.slide_id == ids[5]:
            with open(calls, "ab") as file:
                file.write(b".")
            raise ModelError("the model has 8 dimensions, the bag 16")
        return {}

    seen, calls = [], tmp_path / "calls"
    with pytest.raises(ModelError) as caught:
        seen.extend(slide for slide, _ in map_bags(tiny_cohort, ids, refuse))
    assert str(caught.value) == f"slide {ids[5]}: the model has 8 dimensions, the bag 16"
    assert seen == ids[:5]  # what came before was delivered
    assert calls.read_bytes() == b"."  # the same bag would fail the same way

    def bug(bag: Bag) -> dict[str, np.ndarray]:
        return {"x": np.array([1 / 0])}

    with pytest.raises(ZeroDivisionError) as crashed:
        list(map_bags(tiny_cohort, ids[:2], bug))
    assert f"in slide {ids[0]}" in crashed.value.__notes__[0]


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, also where the tests' own shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["closed", "ctrl-c"])
def test_who_stops_early_waits_for_what_is_under_way_and_cancels_nothing(
    ray_cluster, tiny_cohort, tmp_path, monkeypatch, ctrl_c, how
):
    """Ray aborts the whole process when a task ends just as it is cancelled."""
    ids = list(tiny_cohort.slides["slide_id"])
    groups = list(blocks(tiny_cohort, ids))
    free = groups[0] + groups[1]  # the reader fetches one ahead

    def until_stopped(bag: Bag) -> dict[str, np.ndarray]:
        (tmp_path / bag.slide_id).touch()
        while bag.slide_id not in free and not (tmp_path / "stopped").exists():
            time.sleep(0.01)
        (tmp_path / f"{bag.slide_id} ended").touch()
        return {}

    over, waiting = threading.Event(), threading.Event()

    def tell() -> None:
        while not over.wait(0.01):
            if waiting.is_set() and (tmp_path / groups[2][0]).exists():
                waiting.clear()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if any(key.endswith(stream.STOPPED.encode()) for key in internal_kv._internal_kv_list("deco_ray/")):
                (tmp_path / "stopped").touch()

    def read_on(bags: Iterable) -> None:
        waiting.set()
        list(bags)

    cancel, cancelled = ray_cluster.cancel, []
    monkeypatch.setattr(ray_cluster, "cancel", lambda *task, **how: cancelled.append(task) or cancel(*task, **how))
    teller = threading.Thread(target=tell)
    teller.start()
    try:
        # two tasks at a time, in order: with all of them waiting for a CPU, Ray may begin with any
        stopped = map_bags(tiny_cohort, ids, until_stopped, concurrency=2)
        assert next(stopped)[0] == ids[0]
        if how == "closed":
            stopped.close()
        else:
            with pytest.raises(KeyboardInterrupt):
                read_on(stopped)
    finally:
        over.set()
        teller.join()
    assert not cancelled
    begun = [slide for slide in ids if (tmp_path / slide).exists()]
    assert all((tmp_path / f"{slide} ended").exists() for slide in begun)
    assert len([block for block in groups if block[0] in begun]) <= 4 < len(groups)  # two done, two under way
    assert internal_kv._internal_kv_list("deco_ray/") == []


def test_a_killed_process_is_tried_again_but_not_for_ever(ray_cluster, tiny_cohort, tmp_path):
    """As an out-of-memory killer or a file that crashes a library would: nothing lost, nothing doubled, or told."""
    ids = list(tiny_cohort.slides["slide_id"])

    def dies(bag: Bag, times: int) -> dict[str, np.ndarray]:
        if bag.slide_id == ids[5]:
            with open(tmp_path / str(times), "ab") as deaths:
                deaths.write(b".")
                deaths.flush()
                if deaths.tell() <= times:
                    os.kill(os.getpid(), signal.SIGKILL)
        return {}

    once = functools.partial(dies, times=1)
    assert [slide for slide, _ in map_bags(tiny_cohort, ids, once)] == ids
    assert (tmp_path / "1").stat().st_size == 2
    block = next(block for block in blocks(tiny_cohort, ids) if ids[5] in block)
    with pytest.raises(StageError, match=f"slides {block[0]} to {block[-1]} died 4 times") as told:
        list(map_bags(tiny_cohort, ids, functools.partial(dies, times=99)))
    assert "memory" in str(told.value)
    assert (tmp_path / "99").stat().st_size == stream.ATTEMPTS
    assert internal_kv._internal_kv_list("deco_ray/") == []


def test_a_function_that_does_not_reach_the_workers_is_told(ray_cluster, tiny_cohort):
    with pytest.raises(StageError, match=r"cannot be loaded in a worker .*No module named 'test_stream'"):
        list(map_bags(tiny_cohort, ["s0_000"], unimportable))


def test_a_damaged_part_names_the_slide(ray_cluster, tmp_path):
    with CohortWriter(tmp_path / "c", CohortMeta(name="c", classes=("a",), dim=4)) as writer:
        for index in range(3):
            writer.add(SlideFeatures(f"s{index}", "c", 0, np.ones((50, 4), np.float32)))
    cohort = Cohort.open(tmp_path / "c")
    part = tmp_path / "c" / "patches" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:500])
    with pytest.raises(CohortError, match=r"^slide s0: cannot read .*part-00000.parquet"):
        list(stream_bags(cohort, ["s0", "s1"]))


def test_it_streams_inside_an_actor_that_holds_every_cpu(ray_cluster, tiny_cohort):
    @ray_cluster.remote(num_cpus=2)
    class Trial:
        def run(self, cohort, ids):
            return [bag.slide_id for bag in stream_bags(cohort, ids)]

    ids = list(tiny_cohort.slides["slide_id"])
    trial = Trial.remote()
    try:
        assert ray_cluster.get(trial.run.remote(tiny_cohort, ids), timeout=120) == ids
    finally:
        ray_cluster.kill(trial)


def test_a_slow_reader_holds_the_stream_back(ray_cluster, wide_cohort):
    """240 MB of bags through a reader that takes its time: the store never holds more than a few blocks."""
    ids = list(wide_cohort.slides["slide_id"])
    before, used = ray_cluster.available_resources()["object_store_memory"], []
    for index, bag in enumerate(stream_bags(wide_cohort, ids)):
        assert bag.features[0, 0] == pytest.approx((index + 1) / np.sqrt((index + 1) ** 2 + 511), rel=1e-6)
        if index % 5 == 0:
            time.sleep(0.2)
            used.append(before - ray_cluster.available_resources()["object_store_memory"])
    assert index == 29
    assert max(used) < 200e6
