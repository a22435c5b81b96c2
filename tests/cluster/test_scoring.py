"""Scoring on Ray: one table whatever the number of scorers, interruptions that cost nothing, bugs that stop fast."""

from __future__ import annotations

import errno
import shutil

import numpy as np
import pytest
import torch
from scoring_site import K, Site, make_site

from deco_ray.config import CounterfactualSection
from deco_ray.counterfactual import contributions, slide_scorer
from deco_ray.counterfactual.effects import log_prior
from deco_ray.counterfactual.scoring import ensure_contributions, score_slides
from deco_ray.counterfactual.slide_scorer import plan_chunks
from deco_ray.counterfactual.table import read_table
from deco_ray.errors import ModelError, StageError
from deco_ray.models.saved import load_model


@pytest.fixture
def site(tiny_cohort, tmp_path, monkeypatch) -> Site:
    monkeypatch.setattr(slide_scorer, "CHUNK_SLIDES", 2)
    return make_site(tiny_cohort, tmp_path)


def test_one_table_for_any_number_of_scorers(site, tmp_path, ray_cluster):
    tables = {
        scorers: score_slides(site.job(tmp_path / f"work{scorers}"), site.slides, scorers=scorers, cpus=0.5)
        for scorers in (0, 1, 3)
    }
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[3])
    rows = tables[0].to_pandas()
    assert list(dict.fromkeys(rows["slide_id"])) == site.slides  # the cohort's order, normal slides left out
    model, _ = load_model(site.judge)
    anchors = slide_scorer.Anchors.load(site.anchors)
    prior = log_prior(site.split.train_counts(site.cohort))
    for slide in site.slides[::5]:
        bag, own = site.cohort.bag(slide), rows[rows["slide_id"] == slide]
        wanted = contributions(
            model, bag.features, anchors.assign(bag.features), anchors.replacements, prior, bag.label, method="brute"
        )
        np.testing.assert_array_equal(own["anchor"], wanted.anchors)
        np.testing.assert_array_equal(own["n_patches"], wanted.counts)
        np.testing.assert_allclose(own["effect_label"], wanted.effects[:, wanted.label], atol=1e-5)
        np.testing.assert_allclose(own["effect_rival"], wanted.effects[:, wanted.rival], atol=1e-5)
        assert own["anchor"].max() < K


def test_a_finished_table_is_not_scored_again(site):
    arguments = (site.cohort, site.split, site.anchors, site.judge, CounterfactualSection(), site.store)
    key, folder = ensure_contributions(*arguments, scorers=0)
    shutil.rmtree(site.judge)  # a second scoring would miss it
    assert ensure_contributions(*arguments, scorers=0) == (key, folder)
    assert set(read_table(folder)["slide_id"].to_pylist()) == set(site.slides)
    assert site.store.record("contributions", key)["slides"] == len(site.slides)
    assert not (site.store.root / "work" / f"contributions-{key}").exists()


def test_an_interrupted_scoring_goes_on(site, tmp_path):
    job = site.job(tmp_path / "work")
    calm = score_slides(site.job(tmp_path / "calm"), site.slides, scorers=0)

    def stop(progress):
        if progress["slides_scored"] >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_slides(job, site.slides, scorers=0, report=stop)
    kept = {path: path.stat().st_mtime_ns for path in job.work.glob("*.parquet")}
    assert len(kept) >= 3
    reports: list[dict] = []
    again = score_slides(job, site.slides, scorers=0, report=reports.append)
    assert again.equals(calm)
    assert all(path.stat().st_mtime_ns == moment for path, moment in kept.items())
    assert len(reports) == len(plan_chunks(site.cohort, site.slides)) - len(kept)
    assert reports[-1] == {"slides_scored": len(site.slides), "slides": len(site.slides)}


def test_a_damaged_part_is_scored_again(site, tmp_path):
    job = site.job(tmp_path / "work")
    calm = score_slides(job, site.slides, scorers=0)
    job.part(plan_chunks(site.cohort, site.slides)[1]).write_bytes(b"half a f")
    assert score_slides(job, site.slides, scorers=0).equals(calm)


def test_chunks_hold_the_largest_slides_first(site):
    sizes = dict(zip(site.cohort.slides["slide_id"], site.cohort.slides["n_patches"]))
    order = [sizes[slide] for chunk in plan_chunks(site.cohort, site.slides[::-1]) for slide in chunk.slide_ids]
    assert order == sorted(order, reverse=True)
    assert plan_chunks(site.cohort, site.slides[::-1]) == plan_chunks(site.cohort, site.slides)


@pytest.mark.parametrize("scorers", [0, 2])
def test_a_bug_stops_fast_and_names_the_slide(site, tmp_path, scorers, ray_cluster):
    state = torch.load(site.judge / "model.pt", weights_only=True)
    torch.save({name: tensor * torch.nan for name, tensor in state.items()}, site.judge / "model.pt")
    job = site.job(tmp_path / "work")
    with pytest.raises(StageError, match=r"slide s[12]_\d+ .* not finite"):
        score_slides(job, site.slides, scorers=scorers, cpus=0.5)
    assert {path.stat().st_size for path in job.work.glob("*.attempts")} == {1}  # nothing was tried twice


def test_a_full_disk_is_told_by_an_actor_as_it_is_in_this_process(site, disk, ray_cluster):
    (disk.path / "others").write_bytes(bytes(shutil.disk_usage(disk.path).free))
    for scorers in (0, 2):
        with pytest.raises(OSError, match="No space left") as told:
            score_slides(site.job(disk.path / f"work {scorers}"), site.slides, scorers=scorers, cpus=0.5)
        assert told.value.errno == errno.ENOSPC
    (disk.path / "others").unlink()


def test_a_chunk_that_keeps_killing_its_process_is_given_up(site, tmp_path):
    job = site.job(tmp_path / "work")
    scorer, chunk = slide_scorer.SlideScorer(job), plan_chunks(site.cohort, site.slides)[0]
    job.work.mkdir()
    job.attempts(chunk).write_bytes(b"." * slide_scorer.ATTEMPTS)
    with pytest.raises(StageError, match="out of memory"):
        scorer.score_chunk(chunk)


def test_an_unusable_judge_is_named(site):
    with pytest.raises(ModelError, match="16-dimensional"):
        load_model(site.judge, dim=512)
    weights = bytearray((site.judge / "model.pt").read_bytes())
    weights[len(weights) // 2] ^= 1
    (site.judge / "model.pt").write_bytes(weights)
    with pytest.raises(ModelError, match=r"model\.pt does not hold .* not what was written; train the model again"):
        load_model(site.judge)
    (site.judge / "model.pt").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"model\.pt does not hold the weights"):
        load_model(site.judge)
    (site.judge / "model.json").write_text("{}")
    with pytest.raises(ModelError, match="damaged"):
        load_model(site.judge)
    shutil.rmtree(site.judge)
    with pytest.raises(ModelError, match="no trained model"):
        load_model(site.judge)
