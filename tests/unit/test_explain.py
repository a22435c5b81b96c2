"""Why a slide: ranked anchors against interventions done by hand, example patches, refusals before any work."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import write_tiny_cohort
from fabricated_run import write_run_artefact

from deco_ray.anchors import Anchors
from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort.splits import make_split
from deco_ray.config import Config, CounterfactualSection, MaskingSection, SplitSection
from deco_ray.errors import DecoError
from deco_ray.experiments import patches
from deco_ray.experiments.site import Site
from deco_ray.keys import generator
from deco_ray.models.saved import load_model
from deco_ray.results.explain import EXAMPLES, TOP, explain_slide, headline, write_page, write_tables
from deco_ray.results.explain_command import main
from deco_ray.results.slide_maps import Explainer

CLASSES = ("a", "b", "c")
COUNTS = [9, 5, 2]


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def write_anchors(folder, k=12, dim=16):
    rng = generator("anchors of a test", k, dim)
    folder.mkdir(parents=True)
    Anchors.of(unit(rng.normal(0.2, 1, (k, dim))), unit(rng.normal(0.2, 1, (4, dim)))).save(folder)
    return folder


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    model = write_run_artefact(root / "model", classes=CLASSES, encoder=None, train_counts=COUNTS)
    return model, write_anchors(root / "anchors")


@pytest.fixture(scope="module")
def explainer(stage):
    prior = np.log(np.array(COUNTS) / sum(COUNTS))
    return Explainer(
        load_model(stage[0])[0], Anchors.load(stage[1]), prior, CounterfactualSection(), MaskingSection(), 0
    )


def by_hand(explainer, bag):
    """E' [K, C] by replacing each anchor's patches and asking the model again; NaN for absent anchors."""
    nearest = (bag.features.numpy() @ explainer.anchors.anchors.T).argmax(1)

    def calibrated(features):
        with torch.no_grad():
            logits = explainer.model(features).double().numpy() - explainer.log_prior
        return logits - np.log(np.exp(logits).sum())

    effects = np.full((explainer.anchors.k, 3), np.nan)
    for anchor in set(nearest):
        changed = bag.features.clone()
        changed[torch.from_numpy(nearest == anchor)] = torch.from_numpy(explainer.anchors.replacements[anchor])
        effects[anchor] = calibrated(bag.features) - calibrated(changed)
    return nearest, effects, calibrated(bag.features)


@pytest.mark.parametrize("labelled", [True, False])
def test_anchors_are_ranked_by_what_replacing_them_costs_the_class(explainer, tiny_cohort, labelled):
    bag = tiny_cohort.bag("s2_003")
    bag = bag if labelled else dataclasses.replace(bag, label=-1)
    answer = explain_slide(explainer, bag, CLASSES)
    nearest, effects, factual = by_hand(explainer, bag)
    explained = 2 if labelled else int(factual.argmax())
    assert (answer.found.label, answer.predicted) == (explained, int(factual.argmax()))
    frame = answer.anchors
    assert sorted(frame["anchor"]) == sorted(set(nearest))
    np.testing.assert_array_equal(frame["patches"], np.bincount(nearest)[frame["anchor"]])
    found = frame[[f"effect_{name}" for name in CLASSES]].to_numpy()
    np.testing.assert_allclose(found, effects[frame["anchor"]], atol=1e-5)
    assert (np.diff(frame[f"effect_{CLASSES[explained]}"]) <= 0).all()
    assert ((frame["retention"] >= 0.5 - 1e-9) & (frame["retention"] <= 1)).all()  # r_max is 0.5
    text = headline(answer, CLASSES)
    assert f"Explained: {CLASSES[explained]}" in text
    assert ("Labelled" in text) == labelled


def test_normal_slides_keep_every_patch(explainer, tiny_cohort):
    answer = explain_slide(explainer, tiny_cohort.bag("s0_000"), CLASSES, normal_class=0)
    assert (answer.anchors["retention"] == 1).all()


def test_examples_are_the_patches_nearest_to_their_anchor(explainer, tiny_cohort):
    bag = tiny_cohort.bag("s1_002")
    answer = explain_slide(explainer, bag, CLASSES)
    cosine = bag.features.numpy() @ explainer.anchors.anchors.T
    shown = answer.anchors["anchor"].head(TOP).tolist()
    assert list(dict.fromkeys(answer.examples["anchor"])) == shown
    for anchor, rows in answer.examples.groupby("anchor"):
        own = np.flatnonzero(cosine.argmax(1) == anchor)
        assert len(rows) == min(EXAMPLES, len(own))
        np.testing.assert_allclose(rows["cosine"], np.sort(cosine[own, anchor])[::-1][:EXAMPLES], atol=1e-6)
        np.testing.assert_array_equal(rows[["x", "y"]], bag.coords[rows["patch"]])


def test_pages_are_whole_with_and_without_coordinates(explainer, tiny_cohort, tmp_path):
    bag = dataclasses.replace(tiny_cohort.bag("s1_002"), coords=None)
    answer = explain_slide(explainer, bag, CLASSES)
    write_tables(answer, tmp_path)
    page = write_page(answer, CLASSES, tmp_path, {"model": "m"}, "tau: 1\n", None, "no coordinates, no map").read_text()
    assert page.count("no coordinates, no map") >= 1
    assert "Why slide s1_002" in page
    assert str(answer.anchors["anchor"][0]) in page
    assert pd.read_csv(tmp_path / "s1_002.examples.csv")[["x", "y"]].isna().all(axis=None)
    assert len(pd.read_csv(tmp_path / "s1_002.anchors.csv")) == len(answer.anchors)


def refusal(*arguments) -> str:
    with pytest.raises(DecoError) as raised:
        main([str(argument) for argument in arguments])
    return str(raised.value)


def test_a_reports_heatmaps_name_their_slide_once(explainer, tiny_cohort, tmp_path, monkeypatch):
    site = Site(
        tiny_cohort, make_split(tiny_cohort, SplitSection(val_per_class=2, test_per_class=3)), ArtefactStore(tmp_path)
    )
    written = []
    monkeypatch.setattr(patches, "explainer", lambda *_: explainer)
    monkeypatch.setattr(patches, "write_slide", lambda maps, _: written.append(maps))
    found = [slide for slide, _ in patches.example_heatmaps(Config(), site, None, tmp_path)]
    assert found == [maps.slide_id for maps in written] != []
    for maps in written:  # the page itself puts the id before the title
        assert maps.slide_id not in maps.title
        assert "calibrated prediction" in maps.title


def test_everything_wrong_is_told_before_any_work(stage, tiny_cohort, tmp_path, monkeypatch):
    monkeypatch.setattr("deco_ray.experiments.session.connect", lambda _: pytest.fail("Ray was started"))
    model, anchors = stage
    out, slides = ("--out", tmp_path / "out"), ("--slides", "s1_000,s2_000")
    whole = ("--model", model, "--anchors", anchors, "--cohort", tiny_cohort.uri, *out)
    assert "both --model FOLDER and --anchors" in refusal(*slides, *out, "--model", model)
    assert "say which cohort" in refusal(*slides, *out, "--model", model, "--anchors", anchors)
    assert "s9_000: not in cohort tiny" in refusal(*whole, "--slides", "s1_000,s9_000")
    narrow = write_anchors(tmp_path / "narrow", dim=8)
    assert "have 8 dimensions" in refusal(*slides, *whole, "--anchors", narrow)
    assert "no anchors at" in refusal(*slides, *whole, "--anchors", tmp_path / "absent")
    other = write_run_artefact(tmp_path / "other", classes=("x", "y", "z"), encoder=None)
    assert "x, y, z" in refusal(*slides, *whole, "--model", other)
    wide = write_tiny_cohort(tmp_path / "wide", slides=(1, 1, 1), dim=20)
    assert "have 20" in refusal(*slides, *whole, "--cohort", wide.uri)
    picture = tmp_path / "picture.png"
    assert "no such file" in refusal(*slides, *whole, "--image", picture)
    picture.write_bytes(b"")
    assert "one file for 2 slides" in refusal(*slides, *whole, "--image", picture)
    assert "leave out --config and --set" in refusal(*slides, *out, "--run", tmp_path, "--set", "masking.lam=0.4")
    assert not list(tmp_path.glob("out/*.html"))
