"""Runs through Ray Train: artefacts, shared memory and streaming alike, inside Tune, with a worker group."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pandas as pd
import pytest
import torch
from watched_source import WatchedFeatures

from deco_ray.anchors import Anchors
from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort import Cohort
from deco_ray.cohort.splits import make_split
from deco_ray.config import ModelSection, ResourceSection, SplitSection, TrainingSection
from deco_ray.errors import CohortError, DecoError, StageError
from deco_ray.models.saved import load_model, slide_mark
from deco_ray.training.runner import run_training
from deco_ray.training.shared import StreamedFeatures, fits, load_features, open_source
from deco_ray.training.spec import DecoSpec, RunSpec

RESOURCES = ResourceSection()
FAIL_FAST_S = 30


@pytest.fixture(scope="module")
def split(tiny_cohort):
    return make_split(tiny_cohort, SplitSection(val_per_class=2, test_per_class=2))


@pytest.fixture(scope="module")
def shared(ray_cluster, tiny_cohort):
    return load_features(tiny_cohort, list(tiny_cohort.slides["slide_id"]))


@pytest.fixture
def store(tmp_path):
    return ArtefactStore(tmp_path)


def make_spec(cohort, split, **changes):
    given = {
        "cohort": cohort.checksum,
        "split": split.digest,
        "model": ModelSection(options={"hidden": 16, "attention_dim": 8}),
        "training": TrainingSection(epochs=3, lr=5e-3),
        **changes,
    }
    return RunSpec(**given)


def weights(folder):
    return load_model(folder)[0].state_dict()


def assert_same(left, right):
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_a_run_leaves_a_complete_artefact_and_is_not_run_twice(tiny_cohort, split, store, shared):
    spec, rows = make_spec(tiny_cohort, split), []
    folder = run_training(spec, tiny_cohort, split, store, RESOURCES, shared, report=rows.append)
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert folder == store.path("model", spec.digest)
    assert not list((store.root / "work").iterdir())
    history = pd.read_parquet(folder / "history.parquet")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["best_epoch"] == history["val_macro_f1"].idxmax()  # the first of equals
    predictions = pd.read_parquet(folder / "predictions.parquet")
    assert set(predictions["slide_id"]) == {*split.ids("val"), *split.ids("test")}
    np.testing.assert_allclose(predictions[["p_0", "p_1", "p_2"]].sum(axis=1), 1)
    model, facts = load_model(folder)
    assert facts["train_counts"] == split.train_counts(tiny_cohort)
    assert facts["seen_slides"] == [slide_mark(slide) for slide in split.ids("train") + split.ids("val")]
    row = predictions[predictions["split"] == "test"].iloc[0]
    with torch.inference_mode():
        again = model(tiny_cohort.bag(row["slide_id"]).features).double().softmax(-1)
    np.testing.assert_allclose(again, row[["p_0", "p_1", "p_2"]].to_numpy(float), atol=1e-6)
    assert run_training(spec, tiny_cohort, split, store, RESOURCES, shared, report=rows.append) == folder
    assert len(rows) == 3  # nothing ran


def test_memory_and_stream_give_the_same_weights(tiny_cohort, split, tmp_path, shared):
    streamed, how = open_source(tiny_cohort, list(tiny_cohort.slides["slide_id"]), "stream")
    assert "streamed" in how
    spec = make_spec(tiny_cohort, split)
    left = run_training(spec, tiny_cohort, split, ArtefactStore(tmp_path / "a"), RESOURCES, shared)
    right = run_training(spec, tiny_cohort, split, ArtefactStore(tmp_path / "b"), RESOURCES, streamed)
    assert_same(weights(left), weights(right))


def test_features_in_shared_memory_are_the_cohorts(tiny_cohort, shared):
    ids = list(tiny_cohort.slides["slide_id"])
    assert fits(tiny_cohort, ids)
    found = dict(shared.open().bags(ids))
    for slide in ids:
        assert torch.equal(found[slide], tiny_cohort.bag(slide).features)


def test_slides_whose_reading_kills_its_process_are_named(tiny_cohort, shared, monkeypatch):
    """As a file that crashes its reader would, or one too large for the memory."""

    def die(cohort, slide_ids):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("deco_ray.training.shared.read_block", die)
    with pytest.raises(StageError, match=r"reads slides s0_000 to s2_007 died again and again.*leave the slide out"):
        load_features(tiny_cohort, list(tiny_cohort.slides["slide_id"])).open()


def test_a_slide_that_changed_after_ingest_is_refused(tiny_cohort, shared, tmp_path):
    shutil.copytree(tiny_cohort.uri, tmp_path / "c")
    part = tmp_path / "c" / "patches" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    cohort = Cohort.open(tmp_path / "c")
    ids = list(cohort.slides["slide_id"])
    refused = r"slide s\d_\d+: .*part-00000.parquet.* does not hold what was ingested"
    with pytest.raises(CohortError, match=refused):
        load_features(cohort, ids).open()
    source = StreamedFeatures(cohort).open()
    with pytest.raises(CohortError, match=refused):
        list(source.bags(ids))
    with pytest.raises(CohortError, match=refused):  # what was refused once is looked at again
        list(source.bags(ids[::-1]))
    assert [slide for slide, _ in StreamedFeatures(tiny_cohort).open().bags(ids)] == ids


def test_a_final_model_trains_on_anchors_and_contributions(tiny_cohort, split, store, shared):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from deco_ray.anchors.assignments import FILE
    from deco_ray.counterfactual.table import write_table

    labels = dict(zip(tiny_cohort.slides["slide_id"], tiny_cohort.slides["label"].astype(int)))
    rng, train = np.random.default_rng(0), split.ids("train")
    k, rows, assigned = 4, [], []
    for slide in train:
        assignment = rng.integers(0, k, len(tiny_cohort.bag(slide).features)).astype(np.int16)
        assigned.append({"slide_id": slide, "assignment": assignment.tobytes()})
        if labels[slide] == 0:
            continue
        for anchor in np.unique(assignment).tolist():
            effects = {"effect_label": rng.normal(), "effect_rival": rng.normal(), "mean_attention": 0.01}
            count = int((assignment == anchor).sum())
            rows.append(
                {"slide_id": slide, "label": labels[slide], "rival": 0, "anchor": anchor, "n_patches": count, **effects}
            )
    with store.writing("anchors", "anchors", {}) as folder:
        unit = np.eye(k, 16, dtype=np.float32)
        Anchors(unit, unit[:2], np.zeros(k, np.int64)).save(folder)
        schema = pa.schema([("slide_id", pa.string()), ("assignment", pa.large_binary())])
        pq.write_table(pa.Table.from_pylist(assigned, schema=schema), folder / FILE)
    with store.writing("contributions", "table", {}) as folder:
        write_table(pa.Table.from_pylist(rows), folder)
    spec = make_spec(tiny_cohort, split, kind="deco", deco=DecoSpec(contributions="table", anchors="anchors"))
    folder = run_training(spec, tiny_cohort, split, store, RESOURCES, shared)
    history = pd.read_parquet(folder / "history.parquet")
    assert (history[["main", "pseudo", "consistency"]] > 0).all(axis=None)
    missing = spec.model_copy(update={"deco": DecoSpec(contributions="other", anchors="anchors")})
    with pytest.raises(DecoError, match="needs contributions other"):
        run_training(missing, tiny_cohort, split, store, RESOURCES, shared)


def test_a_method_gets_its_centres(tiny_cohort, split, store, shared):
    spec = make_spec(tiny_cohort, split, model=ModelSection(name="mico"), training=TrainingSection(epochs=1))
    folder = run_training(spec, tiny_cohort, split, store, RESOURCES, shared)
    assert json.loads((folder / "metrics.json").read_text())["epochs"] == 1


def test_inside_a_tune_trial(tiny_cohort, split, store, shared):
    from ray import tune

    spec = make_spec(tiny_cohort, split)

    def trial(config, source):
        run_training(spec, tiny_cohort, split, store, RESOURCES, source, report=tune.report)

    results = tune.Tuner(
        tune.with_resources(tune.with_parameters(trial, source=shared), {"CPU": 1}),
        run_config=tune.RunConfig(storage_path=str(store.root / "tune"), name="t", verbose=0),
    ).fit()
    assert results.num_errors == 0
    assert results[0].metrics["epoch"] == 2
    assert store.exists("model", spec.digest)


@pytest.fixture(scope="module")
def pair(tiny_cohort, split, shared, tmp_path_factory):
    """A calm run of two workers: its spec, folder and reports."""
    spec, rows = make_spec(tiny_cohort, split, workers=2, training=TrainingSection(epochs=2, lr=5e-3)), []
    store = ArtefactStore(tmp_path_factory.mktemp("pair"))
    folder = run_training(spec, tiny_cohort, split, store, RESOURCES, shared, report=rows.append)
    assert not list((store.root / "work").iterdir())
    return spec, folder, rows


def test_two_workers_average_their_gradients(pair, tiny_cohort, split):
    """A step of two slides: its epochs equal a loop that averages the gradients of both."""
    from deco_ray.keys import torch_seed
    from deco_ray.models import create_model
    from deco_ray.training.visits import epoch_visits

    spec, folder, rows = pair
    assert [row["epoch"] for row in rows] == [0, 1]
    torch.manual_seed(torch_seed(*spec.key("init", "abmil")))
    model = create_model("abmil", 16, 3, **spec.model.options)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-5)
    labels = dict(zip(tiny_cohort.slides["slide_id"], tiny_cohort.slides["label"].astype(int)))
    for epoch in range(json.loads((folder / "metrics.json").read_text())["best_epoch"] + 1):
        visits = epoch_visits(split.ids("train"), labels, key=spec.key(epoch))
        for start in range(0, len(visits), 2):
            optimiser.zero_grad()
            step = visits[start : start + 2]
            for visit in step:
                logits = model(tiny_cohort.bag(visit.slide_id).features)
                (torch.nn.functional.cross_entropy(logits, torch.tensor(labels[visit.slide_id])) / len(step)).backward()
            optimiser.step()
    for name, value in weights(folder).items():
        if name != "score.bias":  # no gradient but rounding noise
            torch.testing.assert_close(value, model.state_dict()[name], atol=1e-5, rtol=1e-4)


def test_a_killed_worker_of_a_group_costs_no_bit(pair, tiny_cohort, split, tmp_path, shared):
    """Killed in the second epoch: the other loses its peer, both start again from the first one's checkpoint."""
    spec, folder, _ = pair
    late = len(split.ids("train")) // 2 + 3  # bags of a worker: half of an epoch's visits

    def die_once(count, marker=tmp_path / "killed"):
        if count == late and torch.distributed.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    handle, rows = WatchedFeatures(shared, tmp_path / "notes", die_once), []
    again = run_training(spec, tiny_cohort, split, ArtefactStore(tmp_path), RESOURCES, handle, report=rows.append)
    assert handle.openings() == 4  # of two workers, twice
    assert [row["epoch"] for row in rows] == [0, 1]
    assert json.loads((again / "metrics.json").read_text())["resumes"] == 1
    assert_same(weights(folder), weights(again))


def test_an_error_of_a_groups_worker_is_raised_as_it_was_and_tried_once(tiny_cohort, split, store, shared):
    spec = make_spec(tiny_cohort, split, workers=2)

    def fail(count, failed=store.root / "failed"):
        if count == 3 and torch.distributed.get_rank() == 1:
            failed.touch()
            raise DecoError("slide s1_000 is damaged")

    handle = WatchedFeatures(shared, store.root / "notes", fail)
    with pytest.raises(DecoError, match="slide s1_000 is damaged"):
        run_training(spec, tiny_cohort, split, store, RESOURCES, handle)
    assert handle.openings() == 2
    assert time.time() - (store.root / "failed").stat().st_mtime < FAIL_FAST_S
    assert not store.exists("model", spec.digest)


def test_a_group_that_keeps_dying_is_given_up(tiny_cohort, split, store, shared, monkeypatch):
    starts = []
    monkeypatch.setattr("deco_ray.training.runner.group_ends", lambda job, report: starts.append(job))  # never true
    with pytest.raises(StageError, match="all 4 starts of the run's workers ended with a death"):
        run_training(make_spec(tiny_cohort, split, workers=2), tiny_cohort, split, store, RESOURCES, shared)
    assert len(starts) == RESOURCES.max_failures + 1


def test_a_spec_of_other_data_is_refused(tiny_cohort, split, store, shared):
    spec = make_spec(tiny_cohort, split).model_copy(update={"cohort": "another"})
    with pytest.raises(DecoError, match="other data"):
        run_training(spec, tiny_cohort, split, store, RESOURCES, shared)
