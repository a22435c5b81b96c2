"""The main job on a local Ray: what it leaves, what it reuses, what a failed seed costs."""

from __future__ import annotations

import io
import json
import platform
import subprocess

import numpy as np
import pytest
from pipeline_site import fingerprint, leftovers, tiny_config

from deco_ray.config import with_settings
from deco_ray.errors import CohortError, ConfigError, DecoError
from deco_ray.experiments.board import Board
from deco_ray.experiments.pipeline import run_pipeline
from deco_ray.experiments.pipeline_command import closing
from deco_ray.experiments.session import absolute, check_capacity, concurrent_runs


@pytest.fixture(scope="module")
def finished(ray_cluster, tiny_cohort, tmp_path_factory):
    storage = tmp_path_factory.mktemp("storage")
    config = tiny_config(tiny_cohort.uri, storage, **{"report.pdf": True, "resources.max_concurrent": 1})
    out = io.StringIO()
    return config, run_pipeline(config, Board(out)), out.getvalue()


def test_every_artefact_of_the_contract_exists_and_nothing_else_is_left(finished):
    config, result, _ = finished
    kinds = [name.split("/")[0] for name in fingerprint(config.storage)]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"anchors": 1, "model": 4, "contributions": 2}
    assert leftovers(config.storage) == []
    assert result.failures == {}


def test_judge_and_final_stand_side_by_side_for_every_seed(finished):
    _, result, _ = finished
    counts = result.results[result.results["metric"] == "macro_f1"].groupby("method")["seed"].nunique()
    assert counts.to_dict() == {"judge": 2, "deco": 2}
    text = closing(result)
    assert "judge (abmil)" in text
    assert "DeCo final (abmil)" in text
    groups = "Head (more than 100 training slides): none; Medium: none; Tail (fewer than 20): a, b, c."
    assert groups in text.splitlines()
    assert groups in result.report.read_text()
    assert str(result.report) in text


def test_the_report_has_its_files(finished):
    _, result, _ = finished
    folder = result.report.parent
    for name in ("results.parquet", "config.yaml", "longtail.json", "tables/results.tex", "figures/group_f1.pdf"):
        assert (folder / name).stat().st_size > 0
    assert "Per class" in result.report.read_text()


def test_unequal_trainings_of_judge_and_final_model_are_told(finished, tmp_path):
    config, _, _ = finished
    out = io.StringIO()
    settings = {"seeds": [0], "training.epochs": 1, "storage": str(tmp_path), "report.heatmaps": 0}
    result = run_pipeline(with_settings(config, settings), Board(out))
    assert "note: the judge trains 2 epochs, the final model 1: " in out.getvalue()
    assert "warning: the judge trains 2 epochs, the final model 1: " in closing(result)


def test_a_second_run_trains_nothing_and_says_so(finished):
    """It also takes away what a driver left that was killed when all was done."""
    config, result, _ = finished
    before = fingerprint(config.storage)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    (result.site.store.root / "work" / f"tune-{platform.node()}~{dead.pid}~0123abcd").mkdir(parents=True)
    stamps = {path: path.stat().st_mtime_ns for path in result.report.parent.parent.parent.glob("*/*/artefact.json")}
    out = io.StringIO()
    again = run_pipeline(config, Board(out))
    assert out.getvalue().count("reused") == 7  # two judges, tables, finals and the report
    assert fingerprint(config.storage) == before
    assert leftovers(config.storage) == []
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert again.table.plain() == result.table.plain()


def test_the_report_follows_the_content_of_the_lesion_file(finished, tiny_cohort, tmp_path):
    config, _, _ = finished
    sizes = dict(zip(tiny_cohort.slides["slide_id"], tiny_cohort.slides["n_patches"]))
    config = with_settings(config, {"report.instances": str(tmp_path / "lesions.npz"), "report.pdf": False})
    reports = []
    for lesions in (1, 2, 2):
        np.savez(tmp_path / "lesions.npz", **{slide: np.arange(n) % 5 == lesions for slide, n in sizes.items()})
        reports.append(run_pipeline(config, Board(io.StringIO())).report)
    assert reports[0] != reports[1]
    assert reports[1] == reports[2]


def test_a_lesion_file_is_checked_before_anything_runs(tiny_cohort, tmp_path):
    config = tiny_config(tiny_cohort.uri, tmp_path / "runs", **{"report.instances": str(tmp_path / "lesions.npz")})
    with pytest.raises(ConfigError, match=r"report\.instances = '.*lesions.npz' is no file"):
        absolute(config)
    (tmp_path / "lesions.npz").write_text("slide,class")
    with pytest.raises(CohortError, match=r"cannot read .*lesions.npz"):
        run_pipeline(config, Board(io.StringIO()))
    assert fingerprint(config.storage) == {}


def test_the_board_tells_every_stage_with_its_time(finished):
    _, _, text = finished
    for stage in ("anchors", "judge seed 0", "contributions seed 1", "final seed 1", "report"):
        line = next(line for line in text.splitlines() if stage in line and "running:" not in line)
        assert line.rstrip().endswith("s")


def test_only_a_changed_setting_is_computed_again(finished):
    """λ reshapes stored contributions: no judge, no anchors, no scoring, two final models."""
    config, _, _ = finished
    before = fingerprint(config.storage)
    out = io.StringIO()
    changed = tiny_config(config.cohort, config.storage, **{"masking.lam": 0.2, "resources.max_concurrent": 1})
    run_pipeline(changed, Board(out))
    new = [name for name in fingerprint(config.storage) if name not in before]
    assert [name.split("/")[0] for name in new] == ["model", "model"]
    assert "[2/2]" in out.getvalue()


def test_several_scorers_and_streamed_features_give_the_same_bits(finished, tmp_path):
    """Seed 1 once more with actors for K-means and scoring, and features that are streamed."""
    other = {"resources.scorers": 2, "resources.data": "stream", "anchors.backend": "sharded", "seeds": [1]}
    run_pipeline(tiny_config(finished[0].cohort, tmp_path, **other), Board(io.StringIO()))
    expected = fingerprint(finished[0].storage)
    found = fingerprint(tmp_path)
    assert found == {name: expected[name] for name in found}
    assert len(found) == 4
    assert leftovers(tmp_path) == []


def test_a_failed_seed_leaves_the_others_and_the_same_command_runs_only_what_is_missing(
    finished, tmp_path, monkeypatch
):
    """Seed 1's judge cannot be written: a folder of another's stands in its place.

    Runs go side by side here and one after another in `finished`: that changes no bit either.
    """
    config, _, _ = finished
    expected = fingerprint(config.storage)
    from deco_ray.experiments.study import Study

    own = tiny_config(config.cohort, tmp_path)
    study = Study(own)
    run = study.add(own)[1]
    blocker = study.site(own).store.path("model", run.judge)
    blocker.mkdir(parents=True)
    (blocker / "stranger").write_text("in the way")
    out = io.StringIO()
    result = run_pipeline(own, Board(out))
    assert [run.seed for run in result.runs] == [0]
    assert set(result.failures) == {"judge seed 1", "contributions seed 1", "final seed 1"}
    assert "left out" in result.failures["final seed 1"]
    assert "FAILED" in out.getvalue()
    (blocker / "stranger").unlink()
    blocker.rmdir()
    out = io.StringIO()
    again = run_pipeline(own, Board(out))
    assert again.failures == {}
    assert "[3/3]" in out.getvalue()
    found = fingerprint(tmp_path)
    assert found == {name: expected[name] for name in found}
    assert len(found) == 7


def test_a_plain_method_trains_one_model_a_seed(ray_cluster, tiny_cohort, tmp_path):
    result = run_pipeline(tiny_config(tiny_cohort.uri, tmp_path, method="meanpool", seeds=[0]), Board(io.StringIO()))
    assert list(result.results["method"].unique()) == ["meanpool"]
    metrics = json.loads((result.site.store.path("model", result.runs[0].model) / "metrics.json").read_text())
    assert 0 <= metrics["test"]["macro_f1"] <= 1


def test_data_parallel_runs_do_not_wait_for_their_own_cpus(ray_cluster, tiny_cohort, tmp_path):
    """Two workers fill the cluster: the trial that leads them must hold no CPU."""
    settings = {"method": "meanpool", "resources.workers_per_run": 2, "training.epochs": 1}
    result = run_pipeline(tiny_config(tiny_cohort.uri, tmp_path, seeds=[0], **settings), Board(io.StringIO()))
    assert result.failures == {}


def test_a_missing_cohort_is_told_in_one_sentence(tmp_path):
    with pytest.raises(DecoError, match=r"no cohort at .*deco-ray ingest.*deco-ray synth"):
        run_pipeline(tiny_config(tmp_path / "nowhere", tmp_path / "runs"), Board(io.StringIO()))


def test_a_configuration_of_another_cohort_is_refused(tiny_cohort, tmp_path):
    config = tiny_config(tiny_cohort.uri, tmp_path, **{"paper.dataset": "panda_lt"})
    with pytest.raises(ConfigError, match=r"'panda_lt' has 6 classes, but the cohort tiny .* has 3: a, b, c"):
        run_pipeline(config, Board(io.StringIO()))


def test_a_cluster_too_small_for_one_run_is_refused():
    node = {"Alive": True, "Resources": {"CPU": 2.0}}
    config = tiny_config("x", "y", **{"resources.cpus_per_run": 3})
    with pytest.raises(DecoError, match=r"needs 3 CPU .* has 2; lower it with --set resources.cpus_per_run=2"):
        check_capacity(config.resources, [node])


@pytest.mark.parametrize(
    ("cpus", "gpus", "settings", "expected"),
    [
        (1, 0, {}, 1),
        (2, 0, {}, 2),
        (64, 0, {"resources.cpus_per_run": 4}, 16),
        (8, 2, {"resources.gpus_per_run": 0.25}, 8),
        (64, 1, {"resources.gpus_per_run": 0.3}, 3),
        (8, 0, {"resources.workers_per_run": 2}, 4),
        (8, 0, {"resources.max_concurrent": 3}, 3),
    ],
)
def test_how_many_runs_fit(cpus, gpus, settings, expected):
    node = {"Alive": True, "Resources": {"CPU": float(cpus), "GPU": float(gpus)}}
    assert concurrent_runs(tiny_config("x", "y", **settings).resources, [node]) == expected
