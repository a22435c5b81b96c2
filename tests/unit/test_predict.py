"""Grading slides: against probabilities computed one by one, and every refusal before any work starts."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import write_tiny_cohort
from fabricated_run import write_run_artefact

from deco_ray.artefacts import ArtefactStore
from deco_ray.errors import DecoError, ModelError
from deco_ray.keys import generator
from deco_ray.models.saved import load_model
from deco_ray.results.ensemble import Ensemble, same_encoder
from deco_ray.results.predict import (
    Graded,
    check_output,
    grade,
    prediction_frame,
    rejected_path,
    scores,
    shares,
    write_predictions,
)
from deco_ray.results.predict_command import main
from deco_ray.results.trained import evidence, report_folder, trained_runs
from deco_ray.results.ungraded import CohortSlides, open_slides, read_truth

CLASSES = ("a", "b", "c")


def write_model(folder, seed=0, **facts):
    return write_run_artefact(folder, seed, **({"classes": CLASSES, "encoder": None} | facts))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / str(seed), seed) for seed in range(3)]


def write_features(folder, count=4, dim=16):
    """One .npy file a slide, as encoders write them: rows of any length."""
    folder.mkdir()
    rng = generator("features", count)
    for number in range(count):
        np.save(folder / f"n{number}.npy", rng.normal(1, 2, (9 + number, dim)).astype(np.float32))
    return folder


def answers(table):
    return {slide: (values, error) for slide, values, error in zip(*(column.to_pylist() for column in table))}


@pytest.mark.parametrize("calibrate", [None, 0.0, 1.0, 0.5])
def test_probabilities_are_those_of_each_model_on_the_whole_bag(folders, tiny_cohort, calibrate):
    ensemble = Ensemble.load(folders, calibrate)
    ids = list(tiny_cohort.slides["slide_id"])[::7]
    found = answers(grade(pickle.loads(pickle.dumps(ensemble)), CohortSlides(tiny_cohort), ids))
    assert list(found) == ids
    prior = np.log(np.array([9, 5, 2]) / 16)
    for slide, (values, error) in found.items():
        assert error == ""
        for folder, row in zip(folders, np.reshape(values, (3, 3))):
            with torch.no_grad():
                logits = load_model(folder)[0](tiny_cohort.bag(slide).features).double().numpy()
            odds = np.exp(logits - (calibrate or 0.0) * prior)
            np.testing.assert_allclose(row, odds / odds.sum(), rtol=1e-5)


def test_the_runs_own_correction_is_the_default(tmp_path, tiny_cohort):
    own = write_model(tmp_path / "own", post_hoc_tau=1.0)
    features = tiny_cohort.bag("s1_000").features
    default, same, raw = (Ensemble.load([own], tau).probabilities(features) for tau in (None, 1.0, 0.0))
    np.testing.assert_array_equal(default, same)
    assert not np.allclose(default, raw)


def test_the_table_has_mean_spread_and_agreement():
    given = np.array([[[0.6, 0.4], [0.2, 0.8], [0.9, 0.1]], [[0.1, 0.9], [0.3, 0.7], [0.2, 0.8]]])
    frame = prediction_frame(Graded(["s", "t"], given), ("no", "yes"), {"t": 1})
    assert list(frame) == ["slide_id", "label", "predicted", "p_no", "p_yes", "std_no", "std_yes", "agreement"]
    assert frame["predicted"].tolist() == ["no", "yes"]
    assert frame["label"].tolist()[1] == "yes"
    assert pd.isna(frame["label"][0])
    np.testing.assert_allclose(frame["p_no"], [(0.6 + 0.2 + 0.9) / 3, 0.2])
    np.testing.assert_allclose(frame["std_yes"][1], np.sqrt(((0.9 - 0.8) ** 2 + (0.7 - 0.8) ** 2) / 2))
    np.testing.assert_allclose(frame["agreement"], [2 / 3, 1])
    single = prediction_frame(Graded(["s"], given[:1, :1]), ("no", "yes"), {})
    assert list(single) == ["slide_id", "predicted", "p_no", "p_yes"]


def test_scores_use_the_labelled_slides_only(folders):
    graded = Graded(["s", "t", "u"], np.array([[[0.8, 0.1, 0.1]], [[0.1, 0.8, 0.1]], [[0.1, 0.1, 0.8]]]))
    found = scores(graded, Ensemble.load(folders[:1]), {"s": 0, "t": 2})
    assert (found["n"], found["acc"]) == (2, 0.5)
    assert scores(graded, Ensemble.load(folders[:1]), {}) is None


def test_a_folder_of_features_is_read_where_it_lies_and_bad_files_are_named(folders, tmp_path):
    folder = write_features(tmp_path / "features")
    (folder / "n1.npy").write_bytes(b"\x93NUMPY broken")
    np.save(folder / "n2.npy", np.full((5, 16), np.nan, np.float32))
    np.save(folder / "n3.npy", np.ones((5, 8), np.float32))
    slides = open_slides(str(folder))
    assert (slides.dim, list(slides.sizes())) == (16, ["n0", "n1", "n2", "n3"])
    found = answers(grade(Ensemble.load(folders), slides, list(slides.sizes())))
    assert [bool(error) for _, error in found.values()] == [False, True, True, True]
    for slide, words in (("n1", "n1.npy"), ("n2", "NaN"), ("n3", "8 dimensions")):
        assert words in found[slide][1]
    raw = np.load(folder / "n0.npy")
    unit = torch.from_numpy(raw / np.linalg.norm(raw, axis=1, keepdims=True))
    np.testing.assert_allclose(
        np.reshape(found["n0"][0], (3, 3)), Ensemble.load(folders).probabilities(unit), rtol=1e-4
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features"]  # no copy is left or made


def test_a_feature_file_whose_name_is_not_utf_8_is_listed_among_the_rejected(tmp_path):
    folder = write_features(tmp_path / "features", 2)
    (folder / "n1.npy").rename(folder / os.fsdecode(b"n1\xff.npy"))
    slides = open_slides(str(folder))
    assert list(slides.sizes()) == ["n0"]
    assert list(slides.rejected) == [r"n1\udcff"]
    write_predictions(tmp_path / "p.csv", pd.DataFrame({"slide_id": ["n0"]}), slides.rejected)
    assert pd.read_csv(rejected_path(tmp_path / "p.csv"))["slide_id"].tolist() == [r"n1\udcff"]


def test_tasks_hold_each_slide_once_in_order():
    sizes = {f"s{number}": 5 * 2**20 * (1 + number % 4) for number in range(40)}
    found = list(shares(sizes))
    assert [slide for share in found for slide in share] == list(sizes)
    assert all(sum(sizes[slide] for slide in share) <= 64 * 2**20 for share in found)
    assert len(list(shares({"only": 10**9}))) == 1
    assert list(shares({})) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"classes": ("a", "c", "b")}, "one class list"),
        ({"dim": 8}, "different features"),
        ({"encoder": "uni"}, None),  # the first names none: nothing to compare with
    ],
)
def test_members_must_be_alike(folders, tmp_path, change, words):
    other = write_model(tmp_path / "other", **change)
    if words is None:
        assert Ensemble.load([folders[0], other]).encoder == "uni"
        return
    with pytest.raises(ModelError, match=words):
        Ensemble.load([folders[0], other])


def test_encoders_are_compared_by_name_where_both_are_known():
    assert same_encoder("CONCH v1.5", "conch_v1_5")
    assert same_encoder(None, "uni")
    assert not same_encoder("uni", "uni2")


def refusal(*arguments) -> str:
    """What the command says before it starts Ray; it must say something."""
    with pytest.raises(DecoError) as raised:
        main([str(argument) for argument in arguments])
    return str(raised.value)


def test_everything_wrong_is_told_before_any_work(tmp_path, folders, tiny_cohort, monkeypatch):
    monkeypatch.setattr("deco_ray.experiments.session.connect", lambda _: pytest.fail("Ray was started"))
    out = tmp_path / "out.csv"
    cohort = ("--features", tiny_cohort.uri, "--out", out)
    assert "say which model" in refusal(*cohort)
    assert "no trained model" in refusal(*cohort, "--model", tmp_path / "absent")
    assert ".csv or .parquet" in refusal("--features", tiny_cohort.uri, "--out", "x.txt", "--model", folders[0])
    other = write_model(tmp_path / "classes", classes=("x", "y", "z"))
    assert "x, y, z" in refusal(*cohort, "--model", other)
    assert "8-dimensional" in refusal(*cohort, "--model", write_model(tmp_path / "dim", dim=8))
    broken = write_model(tmp_path / "broken")
    weights = (broken / "model.pt").read_bytes()
    (broken / "model.pt").write_bytes(weights[: len(weights) // 2])
    assert "does not hold the weights" in refusal(*cohort, "--model", broken)
    (broken / "model.json").write_text("{")
    assert "damaged" in refusal(*cohort, "--model", broken)
    named = write_model(tmp_path / "named", encoder="uni")
    features = write_features(tmp_path / "features_conch")
    assert "'conch'" in refusal("--features", features.parent, "--out", out, "--model", named)
    assert "no folder" in refusal("--features", tmp_path / "no", "--out", out, "--model", named)
    labels = tmp_path / "labels.csv"
    labels.write_text("slide_id,label\ns0_000,d\n")
    assert "'d' of slide s0_000" in refusal(*cohort, "--model", folders[0], "--labels", labels)
    assert "no MLflow database" in refusal(*cohort, "--mlflow", "runs:/x/model", "--storage", tmp_path)
    assert not out.exists()


def test_truth_takes_names_and_numbers_and_refuses_two_labels(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("case_id,slide_id,label\np,s,b\np,t,2\n")
    assert read_truth(path, CLASSES) == {"s": 1, "t": 2}
    path.write_text("slide_id,label\ns,b\ns,c\n")
    with pytest.raises(DecoError, match="two labels"):
        read_truth(path, CLASSES)


def test_tables_and_rejected_slides_are_written(tmp_path):
    frame = pd.DataFrame({"slide_id": ["s"], "predicted": ["a"], "p_a": [1 / 3]})
    for name in ("t.csv", "t.parquet"):
        out = check_output(tmp_path / "new" / name)
        write_predictions(out, frame, {"bad": "slide bad: empty"})
        read = pd.read_csv(out) if out.suffix == ".csv" else pd.read_parquet(out)
        pd.testing.assert_frame_equal(read, frame, check_dtype=False)
        assert pd.read_csv(rejected_path(out)).to_numpy().tolist() == [["bad", "slide bad: empty"]]
        before = {path: path.read_bytes() for path in out.parent.iterdir()}
        check_output(out)
        assert {path: path.read_bytes() for path in out.parent.iterdir()} == before  # the work may yet fail
        write_predictions(out, frame, {})
        assert not rejected_path(out).exists()  # of the predictions replaced: it would mislead
    with pytest.raises(DecoError, match="is a folder"):
        check_output((tmp_path / "f.csv").mkdir() or tmp_path / "f.csv")


def write_report(store, name, kind, rows, when):
    folder = store.path("report", name)
    folder.mkdir(parents=True)
    frame = pd.DataFrame(rows, columns=["method", "setting", "seed", "model"]).assign(metric="acc", value=0.5)
    frame.to_parquet(folder / "results.parquet")
    (folder / "artefact.json").write_text(json.dumps({"inputs": {"kind": kind}}))
    os.utime(folder / "results.parquet", (when, when))
    return folder


def test_all_seeds_of_a_finished_run(tmp_path):
    store = ArtefactStore(tmp_path / "runs" / "tiny")
    for digest in ("f0", "f1", "j0"):
        write_model(store.path("model", digest))
    deco = {"contributions": "c0", "anchors": "a0", "masking": {"r_max": 0.9}}
    (store.path("model", "f0") / "artefact.json").write_text(json.dumps({"inputs": {"deco": deco}}))
    (store.path("model", "f1") / "artefact.json").write_text(json.dumps({"inputs": {"deco": None}}))
    store.path("contributions", "c0").mkdir(parents=True)
    inputs = {"anchors": "a0", "judge": "j0", "tau": 0.5}
    (store.path("contributions", "c0") / "artefact.json").write_text(json.dumps({"inputs": inputs}))
    rows = [("judge", "", 0, "j0"), ("deco", "", 0, "f0"), ("deco", "", 1, "f1")]
    write_report(store, "old", "pipeline", [("deco", "", 0, "gone")], 1)
    report = write_report(store, "new", "pipeline", rows, 2)
    sweep = write_report(store, "swept", "sweep", [("deco", "lam=0.4", 0, "f0"), ("deco", "lam=0.6", 0, "f1")], 3)

    for path in (report, report / "results.parquet", store.root, tmp_path / "runs"):
        assert report_folder(path) == report
    runs = trained_runs(report)
    assert [(run.name, run.seed, run.folder.name) for run in runs] == [("deco", 0, "f0"), ("deco", 1, "f1")]
    assert [run.digest for run in trained_runs(report, "judge")] == ["j0"]
    assert [run.digest for run in trained_runs(sweep, "deco lam=0.6")] == ["f1"]
    basis = evidence(runs[0])
    assert (basis.judge.name, basis.anchors.name) == ("j0", "a0")
    assert (basis.counterfactual.tau, basis.masking.r_max) == (0.5, 0.9)
    with pytest.raises(ModelError, match="no DeCo run"):
        evidence(runs[1])
    with pytest.raises(ModelError, match="choose one with --method"):
        trained_runs(sweep)
    with pytest.raises(ModelError, match="no longer"):
        trained_runs(store.path("report", "old"))
    with pytest.raises(ModelError, match="no finished run"):
        report_folder(tmp_path / "elsewhere")


def test_unlabelled_cohorts_have_no_truth(tmp_path):
    cohort = write_tiny_cohort(tmp_path / "c", slides=(2, 1))
    cohort.slides.loc[1, "label"] = -1
    assert CohortSlides(cohort).labels(CLASSES) == {"s0_000": 0, "s1_000": 1}
