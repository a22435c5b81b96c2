"""Resampling against slow loops over scikit-learn, Holm against its definition, and what the words say."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fabricated_run import write_run_artefact
from sklearn.metrics import f1_score

from deco_ray.artefacts import ArtefactStore
from deco_ray.errors import DecoError
from deco_ray.experiments.methods import Run
from deco_ray.experiments.outcome import histories, read_predictions, results_frame
from deco_ray.keys import generator
from deco_ray.results.bootstrap import Predictions, draw_weights, paired_bootstrap, paired_randomisation, scores
from deco_ray.results.metrics import evaluate
from deco_ray.results.statistics import (
    class_change_table,
    class_changes,
    class_warnings,
    compare_methods,
    comparison_statistics_table,
    confusion_matrices,
    holm,
    seeds_won,
    verdict,
)

GROUPS = {"head": [0], "medium": [1, 2], "tail": [3]}


def predictions(skill, *, seeds=2, per_class=15, name="a", classes=4) -> Predictions:
    """Right with the class's skill, else a random class."""
    rng = generator(0, "statistics test", name)
    labels = np.repeat(np.arange(classes), per_class)
    right = rng.random((seeds, len(labels))) < np.asarray(skill)[labels]
    predicted = np.where(right, labels, rng.integers(0, classes, (seeds, len(labels))))
    return Predictions(tuple(f"s{i}" for i in range(len(labels))), labels, predicted, tuple(range(seeds)), classes)


def slow_scores(labels, predicted, classes, groups):
    f1 = f1_score(labels, predicted, labels=range(classes), average=None, zero_division=0)
    result = {"acc": np.mean(labels == predicted), "macro_f1": f1.mean()}
    return result | {f"{name}_f1": f1[members].mean() for name, members in groups.items()}


def test_scores_equal_evaluate_with_a_class_missing():
    given = predictions([0.8, 0.5, 0.5, 0.2], seeds=1)
    keep = given.labels != 2
    one_hot = np.eye(4)[given.predicted[0][keep]]
    expected = evaluate(given.labels[keep], one_hot, GROUPS)
    part = Predictions(("x",) * keep.sum(), given.labels[keep], given.predicted[:, keep], (0,), 4)
    found = scores(confusion_matrices(part), GROUPS)
    for name in ("acc", "macro_f1", "head_f1", "medium_f1", "tail_f1"):
        assert found[name][0] == pytest.approx(expected[name])
    assert "f1_2" not in found


def test_bootstrap_equals_a_loop_over_the_same_draws():
    first, second = predictions([0.7, 0.4, 0.4, 0.1]), predictions([0.7, 0.5, 0.5, 0.6], name="b")
    weights = draw_weights(first.labels, 40, seed=5).astype(int)
    changes: dict[str, list[float]] = {}
    for row in weights:
        drawn = np.repeat(np.arange(len(row)), row)
        means = []
        for method in (first, second):
            runs = [slow_scores(method.labels[drawn], run[drawn], 4, GROUPS) for run in method.predicted]
            means.append({name: np.mean([run[name] for run in runs]) for name in runs[0]})
        for name in means[0]:
            changes.setdefault(name, []).append(means[1][name] - means[0][name])
    found = paired_bootstrap(first, second, GROUPS, resamples=40, seed=5)
    for name, values in changes.items():
        assert [found[name].low, found[name].high] == pytest.approx(np.quantile(values, [0.025, 0.975]), abs=1e-6)


def test_draws_keep_every_class_and_depend_on_the_seed_only():
    labels = predictions([1] * 4).labels
    weights = draw_weights(labels, 50, seed=1)
    for label in range(4):
        assert (weights[:, labels == label].sum(1) == 15).all()
    np.testing.assert_array_equal(weights, draw_weights(labels, 50, seed=1))
    assert (weights != draw_weights(labels, 50, seed=2)).any()


def test_interval_covers_the_truth_about_as_often_as_it_says():
    truth = 0.2  # accuracies 0.5 and 0.7 by construction
    hits = 0
    for trial in range(60):
        rng = generator(trial, "coverage")
        labels = np.repeat([0, 1], 100)
        wrong = 1 - labels
        runs = [np.where(rng.random(200) < accuracy, labels, wrong)[None] for accuracy in (0.5, 0.7)]
        first, second = (Predictions(("s",) * 200, labels, run, (0,), 2) for run in runs)
        gap = paired_bootstrap(first, second, {}, resamples=300, seed=trial)["acc"]
        hits += gap.low <= truth <= gap.high
    assert hits >= 50  # 57 expected; fewer than 50 has probability below 1e-3


def test_randomisation_equals_all_swaps_on_a_tiny_case():
    labels = np.array([0, 0, 0, 1, 1, 1])
    first = Predictions(tuple("abcdef"), labels, np.array([[0, 1, 1, 1, 0, 0]]), (0,), 2)
    second = Predictions(tuple("abcdef"), labels, np.array([[0, 0, 0, 1, 1, 0]]), (0,), 2)
    observed = (second.predicted == labels).mean() - (first.predicted == labels).mean()
    extreme = 0
    for bits in range(64):
        swap = np.array([(bits >> i) & 1 for i in range(6)], dtype=bool)
        one = np.where(swap, second.predicted, first.predicted)
        two = np.where(swap, first.predicted, second.predicted)
        extreme += abs((two == labels).mean() - (one == labels).mean()) >= abs(observed) - 1e-12
    found = paired_randomisation(first, second, {}, resamples=20_000)["acc"]
    assert found == pytest.approx(extreme / 64, abs=0.015)


def test_equal_methods_are_never_told_apart():
    one = predictions([0.5] * 4)
    assert paired_randomisation(one, one, GROUPS, resamples=200)["macro_f1"] == 1.0
    gap = paired_bootstrap(one, one, GROUPS, resamples=200)["macro_f1"]
    assert (gap.estimate, gap.low, gap.high) == (0, 0, 0)


def test_thousands_of_resamples_take_a_moment():
    first = predictions([0.6] * 6, seeds=5, per_class=100, classes=6)
    second = predictions([0.7] * 6, seeds=5, per_class=100, classes=6, name="b")
    started = time.process_time()
    paired_bootstrap(first, second, GROUPS, resamples=5000)
    assert time.process_time() - started < 5  # of CPU; about 0.5 s


def test_other_slides_are_refused():
    one, two = predictions([0.5] * 4), predictions([0.5] * 4, per_class=16)
    with pytest.raises(DecoError, match="different slides"):
        paired_bootstrap(one, two, GROUPS)


def test_predictions_are_read_in_one_order_and_checked(tmp_path):
    rng = generator(0, "read predictions")
    frame = pd.DataFrame({"split": "test", "slide_id": [f"s{i}" for i in range(6)], "label": [0, 1, 2, 0, 1, 2]})
    frame[["p_0", "p_1", "p_2"]] = rng.dirichlet([1, 1, 1], 6)
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        frame.sample(frac=1, random_state=seed).to_parquet(tmp_path / str(seed) / "predictions.parquet")
    found = Predictions.read({0: tmp_path / "0", 1: tmp_path / "1"})
    assert found.slide_ids == tuple(frame["slide_id"])
    np.testing.assert_array_equal(found.predicted[0], found.predicted[1])
    np.testing.assert_array_equal(found.predicted[0], frame[["p_0", "p_1", "p_2"]].to_numpy().argmax(1))
    frame.iloc[:5].to_parquet(tmp_path / "1" / "predictions.parquet")
    with pytest.raises(DecoError, match="other slides"):
        Predictions.read({0: tmp_path / "0", 1: tmp_path / "1"})
    with pytest.raises(DecoError, match="'val'"):
        Predictions.read({0: tmp_path / "0"}, split="val")


def test_a_damaged_file_of_a_run_names_itself_and_the_folder_to_remove(tmp_path):
    with ArtefactStore(tmp_path).writing("model", "run", {}) as written:
        write_run_artefact(written)
    folder = ArtefactStore(tmp_path).path("model", "run")
    sites = {"": SimpleNamespace(store=SimpleNamespace(path=lambda kind, digest: folder))}
    runs = [Run("abmil", "", 0, "digest")]
    readers = {"predictions.parquet": read_predictions, "history.parquet": histories, "metrics.json": results_frame}
    for name, read in readers.items():
        read(runs, sites)
        whole = (folder / name).read_bytes()
        bit = bytearray(whole)
        bit[len(whole) // 3] ^= 1  # most readers would not notice
        for damaged in (b"", whole[: len(whole) // 2], bytes(bit), b"[]"):
            (folder / name).write_bytes(damaged)
            with pytest.raises(DecoError, match=f"{name} is damaged: .*; remove {folder} and run the same command"):
                read(runs, sites)


def test_a_class_that_loses_is_named_and_a_class_that_gains_is_not():
    judge = predictions([1.0, 0.5, 0.5, 0.0], seeds=3, per_class=40)
    final = predictions([0.4, 0.5, 0.5, 0.9], seeds=3, per_class=40, name="b")
    changes = class_changes(judge, final, ["normal", "b", "c", "rare"], resamples=1000)
    warnings = class_warnings(changes, [40] * 4)
    assert any("'normal'" in line and "−" in line for line in warnings)
    assert not any("'rare'" in line for line in warnings)
    readings = {row[0]: row[-1] for row in class_change_table(changes, [100, 50, 20, 5], [40] * 4).rows}
    assert readings["normal"] == "loses"
    assert readings["rare"] == "gains"
    for change in changes:
        assert change.low <= change.change <= change.high


def test_holm_by_its_definition():
    p = [0.01, 0.04, 0.03, 0.005]
    expected = [0.03, 0.06, 0.06, 0.02]  # 4·0.005, 3·0.01, then 2·0.03 carried over 1·0.04
    assert holm(p) == pytest.approx(expected)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_seeds_won_counts_shared_seeds():
    assert seeds_won({0: 0.5, 1: 0.6, 2: 0.7, 9: 1.0}, {0: 0.4, 1: 0.6, 2: 0.8}) == (1, 1, 1)


def test_comparison_and_verdict_say_what_the_data_support():
    methods = {
        "deco": predictions([0.9] * 4, seeds=3, per_class=40),
        "bad": predictions([0.2] * 4, seeds=3, per_class=40, name="bad"),
        "twin": predictions([0.9] * 4, seeds=3, per_class=40, name="twins"),
    }
    found = compare_methods(methods, "deco", GROUPS, metrics=("macro_f1", "tail_f1"), resamples=1000)
    assert [(c.metric, c.other) for c in found] == [(m, o) for m in ("macro_f1", "tail_f1") for o in ("bad", "twin")]
    assert found[0].difference == pytest.approx(
        scores(confusion_matrices(methods["deco"]), {})["macro_f1"].mean()
        - scores(confusion_matrices(methods["bad"]), {})["macro_f1"].mean()
    )
    assert found[0].won == 3
    line = verdict(found, "macro_f1", {"deco": "DeCo-MIL"})
    assert "DeCo-MIL is better than bad" in line
    assert "cannot be told apart from twin" in line
    assert "160 test slides and 3 seeds" in line
    assert comparison_statistics_table(found).rows[0][-1] == "better"
    swapped = compare_methods(methods, "bad", GROUPS, metrics=("macro_f1",), resamples=1000)
    assert "bad is worse than deco" in verdict(swapped)
    assert verdict([], "acc").startswith("Nothing to compare")


def test_empty_groups_are_left_out():
    methods = {"a": predictions([0.5] * 4), "b": predictions([0.5] * 4, name="b")}
    found = compare_methods(methods, "a", {**GROUPS, "tail": []}, resamples=100)
    assert {c.metric for c in found} == {"macro_f1"}


def test_equally_good_methods_rarely_look_different():
    alarms = 0
    for trial in range(60):
        first, second = (predictions([0.8] * 4, per_class=20, name=f"{side}{trial}") for side in "ab")
        alarms += paired_randomisation(first, second, GROUPS, resamples=200, seed=trial)["macro_f1"] < 0.05
    assert alarms <= 9  # 3 expected; more than 9 has probability below 1e-3
