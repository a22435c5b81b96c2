"""Anchors on Ray: the same bits for any number of workers and after a kill; nothing but training slides gets in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading

import numpy as np
import pandas as pd
import pytest
from ray.experimental import internal_kv

from deco_ray.anchors import Anchors, ensure_anchors, fit_kmeans, kmeans, load_assignments, sharded
from deco_ray.anchors import stage as stage_module
from deco_ray.anchors.assignments import load_counts
from deco_ray.anchors.kmeans import fit
from deco_ray.anchors.lloyd import lloyd
from deco_ray.anchors.sharded import ShardedScanner
from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.splits import new_split
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.config import AnchorSection
from deco_ray.errors import CohortError, DecoError, StageError
from deco_ray.keys import generator

pytestmark = pytest.mark.usefixtures("ray_cluster")
SECTION = AnchorSection(k=6, k_normal=3, pool_per_anchor=40, iterations=8)


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> str:
    """Overlapping groups over five chunks, the last a short one, so that the order of sums would show."""
    rng = generator(0, "pool of five chunks")
    rows = rng.normal(size=(4 * kmeans.CHUNK + 1000, 16)) + 2 * rng.normal(size=(12, 16))[rng.integers(0, 12, 263_144)]
    path = tmp_path_factory.mktemp("pool") / "pool.npy"
    np.save(path, (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32))
    return str(path)


@pytest.fixture(scope="module")
def calm(pool):
    return fit(pool, 20, iterations=6)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_bits_of_the_local_backend(pool, calm, workers):
    found = fit(pool, 20, iterations=6, backend="sharded", workers=workers)
    assert found.centroids.tobytes() == calm.centroids.tobytes()
    assert found.record == calm.record


def test_rows_in_memory_travel_to_the_workers(pool):
    x = np.load(pool)[: kmeans.CHUNK + 500] * np.float32(3.0)
    sharded = fit_kmeans(x, 5, iterations=3, backend="sharded", workers=2)
    assert sharded.tobytes() == fit_kmeans(x, 5, iterations=3, backend="local").tobytes()


def test_more_workers_than_cpus_do_not_wait_for_ever(pool):
    with ShardedScanner(pool, workers=5) as scanner:
        assert len({process["pid"] for process in scanner.processes()}) == 5


def test_empty_clusters_are_repaired_by_the_workers_as_locally(pool):
    start = np.load(pool, mmap_mode="r")[[3, 3, 70_000, 70_000, 263_143]]
    with kmeans.open_scanner(pool, "local", 1) as local:
        expected = lloyd(local, start, 2)
    with ShardedScanner(pool, 3) as scanner:
        found = lloyd(scanner, start, 2)
    assert expected.record[0].repairs == 2
    assert found.centroids.tobytes() == expected.centroids.tobytes()


class KillsTwo:
    """A scanner that loses one worker while the third scan runs, and another before the fifth."""

    def __init__(self, scanner: ShardedScanner) -> None:
        self.scanner, self.scans, self.killed = scanner, 0, []

    def scan(self, centroids):
        self.scans += 1
        if self.scans in (3, 5):
            self.killed.append(self.scanner.processes()[self.scans % 2]["pid"])
            threading.Timer(0.02 if self.scans == 3 else 0.0, os.kill, (self.killed[-1], signal.SIGKILL)).start()
        return self.scanner.scan(centroids)

    def farthest(self, centroids, count):
        return self.scanner.farthest(centroids, count)


def test_killed_workers_change_no_bit(pool, calm):
    with ShardedScanner(pool, 2) as scanner:
        killer = KillsTwo(scanner)
        found = lloyd(killer, kmeans.start(np.load(pool, mmap_mode="r"), 20, 0), 6)
        assert len(killer.killed) == 2
        assert not {process["pid"] for process in scanner.processes()} & set(killer.killed)
    assert found.centroids.tobytes() == calm.centroids.tobytes()
    assert found.record == calm.record


def test_a_worker_that_keeps_dying_is_given_up(pool, monkeypatch):
    monkeypatch.setattr(sharded, "DEATHS", 0)
    with ShardedScanner(pool, 1) as scanner:
        os.kill(scanner.processes()[0]["pid"], signal.SIGKILL)
        with pytest.raises(StageError, match="a K-means worker died more than 0 times"):
            scanner.processes()


def test_workers_hold_their_chunks_and_little_more(pool):
    with ShardedScanner(pool, 2) as scanner:
        list(scanner.scan(np.load(pool)[:20]))
        for process in scanner.processes():
            assert process["peak"] <= process["chunks"] + 300 * 2**20


# --- the stage -------------------------------------------------------------------------------------------------


def write_cohort(path, poison: str | None = None, zero: str | None = None) -> tuple[Cohort, dict[str, str]]:
    """Two classes; every third slide is for validation. Poisoned validation slides hold NaN and huge numbers."""
    rng = generator(0, "anchor cohort")
    parts = {}
    with CohortWriter(path, CohortMeta(name="toy", classes=("normal", "tumour"), normal_class=0, dim=8)) as writer:
        for index in range(15):
            slide, label = f"s{index:02d}", index % 2
            parts[slide] = "val" if index % 3 == 0 else "train"
            features = rng.normal(size=(20 + 3 * index, 8)).astype(np.float32) + label
            if poison and parts[slide] == "val":
                features[:] = 1e30 if index % 2 else np.nan
            if zero == slide:
                features[7] = 0
            writer.add(SlideFeatures(slide, slide, label, features))
    return Cohort.open(str(path)), parts


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    cohort, parts = write_cohort(folder / "cohort")
    split = new_split(cohort, "toy", parts, {})
    store = ArtefactStore(folder / "runs")
    key, path = ensure_anchors(cohort, split, SECTION, store)
    return cohort, split, store, key, path


def test_the_artefact_holds_the_contract(made):
    cohort, split, store, key, path = made
    anchors = Anchors.load(path)
    assert anchors.anchors.shape == (6, 8)
    assert anchors.normals.shape == (3, 8)
    assert store.exists("anchors", key)
    assignments = load_assignments(path)
    assert list(assignments) == split.ids("train")
    for slide, assignment in assignments.items():
        np.testing.assert_array_equal(assignment, anchors.assign(cohort.bag(slide).features))
    counts, labels = load_counts(path)
    assert counts.to_numpy().sum() == sum(len(a) for a in assignments.values())
    assert labels.tolist() == [cohort.row(slide)["label"] for slide in counts.index]
    record = json.loads((path / "convergence.json").read_text())
    for lines in record.values():
        assert lines[0].keys() == {"objective", "moved", "repairs"}
        assert (np.diff([line["objective"] for line in lines]) > -1e-6).all()
    pool = pd.read_parquet(path / "pool.parquet").set_index("slide_id")
    assert pool["anchors"].sum() == 240
    assert pool["normals"].sum() == 120
    assert (pool["anchors"] <= pool["n_patches"]).all()


def test_the_pool_and_all_temporary_files_are_gone(made):
    _, _, store, key, path = made
    assert not (store.root / "work" / f"anchors-{key}").exists()
    assert [p.name for p in path.parent.iterdir()] == [key]


def test_an_artefact_that_exists_is_not_made_again(made, monkeypatch):
    cohort, split, store, key, path = made
    monkeypatch.setattr(stage_module, "_make", lambda *_: pytest.fail("made again"))
    other_backend = SECTION.model_copy(update={"backend": "sharded", "workers": 2})
    assert ensure_anchors(cohort, split, other_backend, store) == (key, path)


def test_the_sharded_stage_gives_the_same_files(made, tmp_path):
    cohort, split, _, key, path = made
    section = SECTION.model_copy(update={"backend": "sharded", "workers": 2})
    again, other = ensure_anchors(cohort, split, section, ArtefactStore(tmp_path))
    assert again == key
    for name in ("anchors.npz", "assignments.parquet", "convergence.json", "pool.parquet"):
        assert (other / name).read_bytes() == (path / name).read_bytes(), name


def test_poisoned_validation_slides_do_not_get_in(made, tmp_path):
    poisoned, parts = write_cohort(tmp_path / "cohort", poison="val")
    assert not np.isfinite(poisoned.bag("s00").features).all()
    _, path = ensure_anchors(poisoned, new_split(poisoned, "toy", parts, {}), SECTION, ArtefactStore(tmp_path / "runs"))
    clean = made[-1]
    for name in ("anchors.npz", "assignments.parquet", "convergence.json", "pool.parquet"):
        assert (path / name).read_bytes() == (clean / name).read_bytes(), name


def test_an_interrupted_stage_resumes_its_iterations(made, tmp_path, monkeypatch):
    cohort, split, _, _, path = made
    store = ArtefactStore(tmp_path)

    def interrupted(_folder, _k, slides):
        next(slides)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stage_module, "write_assignments", interrupted)
        with pytest.raises(KeyboardInterrupt) as told:
            ensure_anchors(cohort, split, SECTION, store)
    assert nothing_streams(told)
    assert not list((tmp_path / "anchors").iterdir())
    monkeypatch.setattr(kmeans.LocalScanner, "scan", lambda *_: pytest.fail("iterated again"))
    _, again = ensure_anchors(cohort, split, SECTION, store)
    assert (again / "anchors.npz").read_bytes() == (path / "anchors.npz").read_bytes()


def nothing_streams(told: pytest.ExceptionInfo) -> bool:
    """The pass over the slides was ended before the error arrived here, whose traceback would keep it."""
    assert told.tb
    return internal_kv._internal_kv_list("deco_ray/") == []


def files(folder) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file()]


def test_too_few_distinct_patches_are_refused_and_nothing_is_written(made, tmp_path):
    cohort, split, *_ = made
    with pytest.raises(DecoError, match=r"k=500 .* \d+ pooled ones hold \d+"):
        ensure_anchors(cohort, split, SECTION.model_copy(update={"k": 500}), ArtefactStore(tmp_path))
    assert not files(tmp_path)


def test_no_normal_training_slide_is_refused_and_nothing_is_written(made, tmp_path):
    cohort, split, *_ = made
    parts = {slide: part for slide, part in split.assignment.items() if cohort.row(slide)["label"] == 1}
    with pytest.raises(CohortError, match=r"none of the \d+ training slides is of the normal class 'normal'"):
        ensure_anchors(cohort, new_split(cohort, "toy", parts, {}), SECTION, ArtefactStore(tmp_path))
    assert not files(tmp_path)


def test_zero_vectors_are_refused_by_slide_and_patch(tmp_path):
    cohort, parts = write_cohort(tmp_path / "cohort", zero="s04")
    with pytest.raises(DecoError, match=r"slide s04: patch 7 is a zero vector"):
        ensure_anchors(cohort, new_split(cohort, "toy", parts, {}), SECTION, ArtefactStore(tmp_path / "runs"))
    assert not files(tmp_path / "runs")


def test_a_cohort_that_changed_since_the_split_was_made_is_refused(made, tmp_path):
    _, split, *_ = made
    changed, _ = write_cohort(tmp_path / "cohort", poison="val")
    with pytest.raises(CohortError, match="was made for other data"):
        ensure_anchors(changed, split, SECTION, ArtefactStore(tmp_path / "runs"))
    assert not files(tmp_path / "runs")


def test_a_disk_that_fills_up_while_the_pool_is_drawn_is_told(disk, tiny_cohort):
    """A pool behind a memory map would end the process with SIGBUS."""
    split = new_split(tiny_cohort, "all", dict.fromkeys(tiny_cohort.slides["slide_id"], "train"), {})
    store, others = ArtefactStore(disk.path / "runs"), disk.path / "others"
    others.write_bytes(bytes(shutil.disk_usage(disk.path).free - 3 * 4096))  # the folders, and a first block
    with pytest.raises(DecoError, match=r"cannot write to .*No space left.*make room") as told:
        ensure_anchors(tiny_cohort, split, SECTION, store)
    assert nothing_streams(told)
    assert not list(store.root.rglob("*.tmp"))
    others.unlink()
    ensure_anchors(tiny_cohort, split, SECTION, store)
