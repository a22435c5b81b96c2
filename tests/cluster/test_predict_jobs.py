"""Predict and explain as users run them: one command each, on Ray, against the same work done in this process."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from conftest import write_tiny_cohort
from fabricated_run import write_run_artefact

from deco_ray.anchors import Anchors
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.config import TrackingSection
from deco_ray.errors import DecoError
from deco_ray.keys import generator
from deco_ray.models.saved import slide_mark
from deco_ray.results import explain_command, predict_command
from deco_ray.results.ensemble import Ensemble
from deco_ray.results.tracking import Tracker

CLASSES = ("a", "b", "c")


def run(command, *arguments) -> None:
    assert command.main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_run_artefact(root / str(seed), seed, classes=CLASSES, encoder=None) for seed in (0, 1)]


def test_an_ensemble_grades_a_cohort_as_one_process_would(ray_cluster, folders, tiny_cohort, tmp_path, capsys):
    out = tmp_path / "grades.parquet"
    models = [argument for folder in folders for argument in ("--model", folder)]
    run(predict_command, *models, "--features", tiny_cohort.uri, "--out", out, "--calibrate", "1")
    frame = pd.read_parquet(out)
    assert frame["slide_id"].tolist() == tiny_cohort.slides["slide_id"].tolist()
    ensemble = Ensemble.load(folders, 1.0)
    expected = np.array([ensemble.probabilities(tiny_cohort.bag(slide).features) for slide in frame["slide_id"]])
    columns = [f"p_{name}" for name in CLASSES]
    np.testing.assert_allclose(frame[columns], expected.mean(1), rtol=1e-5)
    np.testing.assert_allclose(frame["std_b"], expected.std(1, ddof=1)[:, 1], rtol=1e-3, atol=1e-7)
    right = (expected.mean(1).argmax(1) == tiny_cohort.slides["label"]).mean()
    told = capsys.readouterr().out
    assert f"{right:.3f}" in told  # labels are known, so scores are printed
    assert "note: a model does not say which slides it was trained on" in told
    assert not (tmp_path / "grades.parquet.rejected.csv").exists()


def test_slides_the_model_learnt_from_are_told_and_not_scored(ray_cluster, tiny_cohort, tmp_path, capsys):
    ids = tiny_cohort.slides["slide_id"].tolist()
    marks = [slide_mark(slide) for slide in ids]
    parts = {"seen_slides": marks[:20], "classes": CLASSES, "encoder": None}
    model = write_run_artefact(tmp_path / "model", **parts)
    whole = write_run_artefact(tmp_path / "whole", **parts | {"seen_slides": marks})
    features = tmp_path / "features"  # another copy of the slides, as they were before they became a cohort
    features.mkdir()
    for slide in ids:
        np.save(features / f"{slide}.npy", 3 * tiny_cohort.bag(slide).features.numpy())
    labels = [f"{slide},{slide},{CLASSES[label]}" for slide, label in zip(ids, tiny_cohort.slides["label"])]
    (features / "labels.csv").write_text("\n".join(["case_id,slide_id,label", *labels]))
    asked = ("--features", features, "--out", tmp_path / "grades.csv")
    run(predict_command, "--model", model, *asked)
    told = capsys.readouterr().out
    assert "warning: 20 of the 29 labelled slides were trained on or chosen by" in told
    frame = pd.read_csv(tmp_path / "grades.csv").set_index("slide_id").loc[ids[20:]]
    assert "9 new labelled slides" in told
    assert f"{(frame['label'] == frame['predicted']).mean():.3f}" in told
    run(predict_command, "--model", model, "--model", whole, *asked)
    told = capsys.readouterr().out
    assert "29 of the 29 labelled slides" in told
    assert "ACC" not in told


def cohort_with_a_bad_slide(path) -> Cohort:
    rng = generator("one bad slide")
    with CohortWriter(path, CohortMeta(name="new", classes=(), dim=16)) as writer:
        for number in range(30):
            features = rng.normal(0, 1, (12, 16)).astype(np.float32)
            if number == 17:
                features[3] = np.nan
            writer.add(SlideFeatures(f"n{number:02d}", f"n{number:02d}", -1, features))
    return Cohort.open(str(path))


def test_one_bad_slide_is_listed_and_the_rest_are_graded(ray_cluster, folders, tmp_path):
    cohort = cohort_with_a_bad_slide(tmp_path / "new")
    out = tmp_path / "grades.csv"
    asked = ("--model", folders[0], "--features", cohort.uri, "--out", out)
    with pytest.raises(DecoError, match="slide n17: the prediction is not finite"):
        run(predict_command, *asked)
    assert not out.exists()
    run(predict_command, *asked, "--on-error", "skip")
    assert "n17" not in pd.read_csv(out)["slide_id"].tolist()
    assert len(pd.read_csv(out)) == 29
    assert pd.read_csv(f"{out}.rejected.csv")["slide_id"].tolist() == ["n17"]


def test_a_model_logged_to_mlflow_grades_a_folder_of_files(ray_cluster, tiny_cohort, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folders = [
        write_run_artefact(tmp_path / "model", classes=CLASSES, encoder=None, seen_slides=[slide_mark("s2_001")])
    ]
    tracker = Tracker.open(TrackingSection(), tmp_path / "runs", tiny_cohort)
    child = tracker.child(tracker.parent("p", "pipeline", "d"), "final s0", "d0")
    child.log_run_artefact(folders[0])
    features = tmp_path / "features"
    features.mkdir()
    for slide in ("s0_000", "s2_001"):
        np.save(features / f"{slide}.npy", 3 * tiny_cohort.bag(slide).features.numpy())
    out = tmp_path / "grades.csv"
    asked = ("--storage", tmp_path / "runs", "--features", features, "--out", out)
    run(predict_command, "--mlflow", f"runs:/{child.run_id}/model", *asked)
    frame = pd.read_csv(out)
    assert list(frame) == ["slide_id", "predicted", "p_a", "p_b", "p_c"]
    for _, row in frame.iterrows():
        expected = Ensemble.load(folders[:1]).probabilities(tiny_cohort.bag(row["slide_id"]).features)[0]
        np.testing.assert_allclose(row[["p_a", "p_b", "p_c"]].to_numpy(float), expected, rtol=1e-4)
    (tmp_path / "labels.csv").write_text("case_id,slide_id,label\n,s0_000,a\n,s2_001,c\n")
    run(predict_command, "--mlflow", f"runs:/{child.run_id}/model", *asked, "--labels", tmp_path / "labels.csv")
    assert "warning: 1 of the 2 labelled slides were trained on or chosen by" in capsys.readouterr().out
    with pytest.raises(DecoError, match="MLflow has no model"):
        run(predict_command, "--mlflow", "runs:/0123456789abcdef/model", *asked)


def test_explain_writes_every_file_and_refuses_maps_without_coordinates(
    ray_cluster, folders, tiny_cohort, tmp_path, capsys
):
    rng = generator("anchors")
    rows = rng.normal(0.2, 1, (12, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    (tmp_path / "anchors").mkdir()
    Anchors.of(rows[:8], rows[8:]).save(tmp_path / "anchors")
    asked = ("--model", folders[0], "--anchors", tmp_path / "anchors", "--out", tmp_path / "why")
    run(explain_command, *asked, "--cohort", tiny_cohort.uri, "--slides", "s1_000,s2_001", "--slides", "s0_002")
    endings = {"anchors.csv", "examples.csv", "geojson", "html", "parquet", "pdf", "png"}
    for slide in ("s1_000", "s2_001", "s0_002"):
        found = {path.name.split(".", 1)[1] for path in (tmp_path / "why").glob(f"{slide}.*")}
        assert found == endings
        patches = tiny_cohort.row(slide)["n_patches"]
        assert len(json.loads((tmp_path / "why" / f"{slide}.geojson").read_text())["features"]) == patches
        assert "data:image/png" in (tmp_path / "why" / f"{slide}.html").read_text()

    blind = write_tiny_cohort(tmp_path / "blind", slides=(1, 1, 1), coords=False)
    capsys.readouterr()
    run(explain_command, *asked, "--cohort", blind.uri, "--slides", "all", "--out", tmp_path / "blind_why")
    told = capsys.readouterr().out
    assert "slide s2_000 has no patch coordinates" in told
    assert "3 of 3 slides explained" in told
    found = {path.name for path in (tmp_path / "blind_why").glob("s2_000.*")}
    assert found == {"s2_000.anchors.csv", "s2_000.examples.csv", "s2_000.html"}
