"""Sweeps, comparisons, the plan and the search on a local Ray: what they share, what they leave."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from pipeline_site import fingerprint, tiny_config

from deco_ray.cli import main as command_line
from deco_ray.config import load_config
from deco_ray.experiments.board import Board
from deco_ray.experiments.pipeline import run_pipeline
from deco_ray.experiments.plan import open_plan
from deco_ray.experiments.search import load_search, run_search
from deco_ray.experiments.study import Study
from deco_ray.experiments.variants import load_variants
from deco_ray.experiments.varied import add_varied


def write(path, tree):
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def base(ray_cluster, tiny_cohort, tmp_path_factory):
    """A finished pipeline, and its configuration as a file."""
    folder = tmp_path_factory.mktemp("studies")
    config = tiny_config(tiny_cohort.uri, folder / "runs", **{"report.heatmaps": 0, "resources.max_concurrent": 1})
    run_pipeline(config, Board(io.StringIO()))
    return config, write(folder / "base.yaml", config.model_dump(mode="json")), folder


def test_a_sweep_over_lambda_trains_final_models_only(base, capsys):
    config, path, folder = base
    before = fingerprint(config.storage)
    sweep = {"kind": "sweep", "title": "λ", "axis": "masking.lam", "axis_label": "λ", "values": [0.0, 0.6]}
    assert command_line(["sweep", "--config", write(folder / "lambda.yaml", sweep), "--base", path]) == 0
    new = [name.split("/")[0] for name in fingerprint(config.storage) if name not in before]
    assert new == ["model", "model"]  # λ = 0.6 is the base: its finals exist; no judge, no anchors, no scoring
    out = capsys.readouterr().out
    assert "6 trainings (8 if each brought its own judge), 2 to do" in out
    lines = [
        line.split("] ", 1)[-1].split() for line in out.splitlines() if " seed 0" in line and "running:" not in line
    ]
    assert ["judge", "seed", "0", "reused"] in lines
    assert ["final", "seed", "0", "(λ", "0.6)", "reused"] in lines
    assert any("final seed 0 (λ 0.0)" in line for line in out.splitlines())
    report = next(line.split()[1] for line in out.splitlines() if line.startswith("report"))
    assert "default λ" in Path(report).read_text()


def test_a_comparison_prints_its_table_and_a_verdict(base, capsys):
    _, path, folder = base
    compare = {"kind": "comparison", "title": "floor", "methods": ["meanpool", "abmil", "deco"]}
    assert command_line(["compare", "--config", write(folder / "compare.yaml", compare), "--base", path]) == 0
    out = capsys.readouterr().out
    assert "DeCo-MIL" in out
    assert "Tail (fewer than 20): a, b, c." in out
    assert "On Macro-F1, over 6 test slides and 2 seeds, DeCo-MIL" in out


def test_a_report_follows_its_file_and_is_reused_with_its_verdicts(base, capsys):
    _, path, folder = base
    compare = {"kind": "comparison", "title": "two", "methods": ["meanpool", "abmil"], "reference": "abmil"}

    def told(file: dict, *more: str) -> list[str]:
        assert command_line(["compare", "--config", write(folder / "two.yaml", file), "--base", path, *more]) == 0
        out = capsys.readouterr().out.splitlines()
        return [line for line in out if line.startswith(("report ", "On "))]

    first = told(compare)
    assert len(first) > 1
    assert told(compare) == first
    page = Path(first[-1].split(maxsplit=1)[1])
    for name in ("verdicts.json", "report.html", "results.parquet"):
        (page.parent / name).unlink()
        assert told(compare) == first
        assert (page.parent / name).is_file()
    other = told({**compare, "reference": "meanpool"})
    assert not set(first) & set(other)
    assert told(compare, "--set", "paper.same_features=true")[-1] not in (first[-1], other[-1])


def test_the_plan_merges_identical_work_and_reports_every_item(base, capsys):
    _, path, folder = base
    plan = {
        "title": "tiny paper",
        "cohorts": {"tiny": path},
        "items": {
            "table3": {"file": "masking.yaml"},
            "figd1": {"file": "lambda.yaml"},
            "fig5": {"analysis": "longtail"},
        },
    }
    masking = {
        "kind": "ablation",
        "title": "Masking",
        "paper_table": "table3_masking",
        "variants": [
            {"name": "random", "settings": {"masking.strategy": "random"}},
            {"name": "counterfactual", "settings": {}},
        ],
    }
    write(folder / "masking.yaml", masking)
    file = write(folder / "paper.yaml", plan)
    opened = open_plan(file)
    naive, unique, missing = opened.counts()
    assert (naive, unique, missing) == (20, 8, 2)  # five settings of two seeds, judge and final each; two judges shared
    assert command_line(["reproduce", "--config", file, "--dry-run"]) == 0
    assert "20 if every experiment had its own judges and finals" in capsys.readouterr().out
    assert command_line(["reproduce", "--config", file]) == 0
    out = capsys.readouterr().out
    page = Path(next(line.split()[1] for line in out.splitlines() if line.startswith("report"))).read_text()
    for title in ("Masking", "λ", "Nested long tail: tiny"):
        assert title in page
    write(folder / "masking.yaml", {**masking, "reference": "random"})
    assert command_line(["reproduce", "--config", file]) == 0
    assert page != Path(capsys.readouterr().out.partition("\nreport")[2].split()[0]).read_text()
    assert open_plan(file).counts()[2] == 0


def test_an_unknown_item_is_answered_with_those_there_are(base, capsys):
    _, _, folder = base
    assert command_line(["reproduce", "--config", str(folder / "paper.yaml"), "--only", "table9"]) == 1
    assert "no item 'table9'; it has table3, figd1, fig5" in capsys.readouterr().err


def test_one_failing_variant_leaves_the_rest(base, capsys):
    """A model option nobody has: its trials fail, the others' results are printed, the exit code says so."""
    _, path, folder = base
    broken = {
        "kind": "comparison",
        "title": "one breaks",
        "variants": [
            {"name": "abmil", "settings": {"method": "abmil"}},
            {"name": "broken", "settings": {"method": "clam_sb", "training.lr": 1.0, "training.loss": "ldam"}},
        ],
    }
    file, loaded = load_variants(write(folder / "broken.yaml", broken), path)
    study = Study(loaded)
    varied = add_varied(study, file, loaded)
    blocker = study.site(loaded).store.path("model", varied.runs["broken"][0].model)
    blocker.mkdir(parents=True)
    (blocker / "stranger").write_text("in the way")
    assert command_line(["compare", "--config", str(folder / "broken.yaml"), "--base", path]) == 1
    out = capsys.readouterr().out
    assert "AB-MIL" in out
    assert "failed: clam_sb seed 0" in out


def test_the_search_writes_a_configuration_that_the_pipeline_takes(base):
    _, path, folder = base
    search = {
        "kind": "search",
        "title": "tiny search",
        "trials": 3,
        "seeds": [0],
        "grace_epochs": 1,
        "space": {"masking.lam": {"low": 0.0, "high": 1.0}, "anchors.k": {"values": [4, 6]}},
    }
    file, loaded = load_search(write(folder / "search.yaml", search), path, ())
    found = run_search(file, loaded, Board(io.StringIO()))
    assert len(found.trials) == 3
    assert found.failed == 0
    best = load_config(found.path)
    assert best.masking.lam == found.best["masking.lam"]
    assert best.anchors.k == found.best["anchors.k"]
    assert best.seeds == (0, 1, 2, 3, 4)
    store = Study(loaded).site(loaded).store
    scores = [json.loads(path.read_text())["val"]["macro_f1"] for path in store.root.glob("model/*/metrics.json")]
    assert found.score in scores  # chosen on validation
