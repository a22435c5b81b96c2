import json

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from deco_ray.errors import DecoError
from deco_ray.keys import generator
from deco_ray.results.metrics import evaluate

GROUPS = {"head": [0], "medium": [1, 2], "tail": [3]}


def predictions(n=200, classes=4, seed=0):
    rng = generator(seed, "predictions")
    labels = rng.integers(0, classes, n)
    logits = rng.normal(size=(n, classes)) + 1.2 * np.eye(classes)[labels]
    probabilities = np.exp(logits)
    return labels, probabilities / probabilities.sum(1, keepdims=True)


def test_agrees_with_scikit_learn_when_all_classes_are_present():
    labels, probabilities = predictions()
    predicted = probabilities.argmax(1)
    metrics = evaluate(labels, probabilities, GROUPS)
    per_class = f1_score(labels, predicted, average=None)
    assert metrics["acc"] == pytest.approx((labels == predicted).mean())
    assert metrics["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"))
    assert metrics["auc"] == pytest.approx(roc_auc_score(labels, probabilities, multi_class="ovr"))
    assert metrics["balanced_acc"] == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert metrics["f1_per_class"] == pytest.approx(list(per_class))
    assert metrics["medium_f1"] == pytest.approx(per_class[1:3].mean())
    assert np.sum(metrics["confusion"]) == len(labels)
    assert metrics["missing"] == []


def test_ece_against_a_loop_over_bins():
    labels, probabilities = predictions()
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    expected = 0.0
    for low in range(15):
        inside = (confidence >= low / 15) & ((confidence < (low + 1) / 15) | (low == 14))
        if inside.any():
            expected += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    assert evaluate(labels, probabilities, GROUPS)["ece"] == pytest.approx(expected)


def test_certain_and_right_is_calibrated():
    assert evaluate([0, 1], [[1.0, 0.0], [0.0, 1.0]], {"head": [0], "tail": [1]})["ece"] == 0.0


def test_a_missing_class_is_reported_and_left_out():
    labels, probabilities = predictions()
    keep = labels != 3
    metrics = evaluate(labels[keep], probabilities[keep], GROUPS)
    assert metrics["missing"] == [3]
    assert metrics["tail_f1"] is None
    assert metrics["f1_per_class"][3] is None
    assert metrics["support"][3] == 0
    ovr = [roc_auc_score(labels[keep] == label, probabilities[keep, label]) for label in range(3)]
    assert metrics["auc"] == pytest.approx(np.mean(ovr))
    json.dumps(metrics, allow_nan=False)


def test_a_single_class_has_no_auc():
    metrics = evaluate([1, 1], [[0.3, 0.7], [0.6, 0.4]], {"head": [0], "medium": [], "tail": [1]})
    assert metrics["auc"] is None
    assert metrics["head_f1"] is None
    assert metrics["tail_f1"] == pytest.approx(2 / 3)
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize(
    ("labels", "probabilities", "words"),
    [
        ([], np.zeros((0, 2)), "no slides"),
        ([0, 2], np.full((2, 2), 0.5), "2 classes"),
        ([0], [[np.nan, 1.0]], "not finite"),
        ([0, 1], [[0.5, 0.5]], "must be"),
    ],
)
def test_unusable_predictions_are_named(labels, probabilities, words):
    with pytest.raises(DecoError, match=words):
        evaluate(labels, probabilities, GROUPS)
