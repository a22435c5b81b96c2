"""Rebalancing criteria against their formulas, one slide a step."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from torch.nn.functional import cross_entropy

from deco_ray.config import TrainingSection
from deco_ray.training.losses import adjust_logits, log_prior, make_criterion

COUNTS = [80, 16, 4]
LOGITS = torch.tensor([[0.4, -0.3, 1.1], [2.0, 0.1, -1.0]])
LABELS = torch.tensor([2, 0])


def loss(name, logits=LOGITS, labels=LABELS, **options):
    return float(make_criterion(TrainingSection(loss=name, **options), COUNTS)(logits, labels))


def softmax(row):
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def test_ce():
    assert loss("ce") == pytest.approx(float(cross_entropy(LOGITS, LABELS)))


@pytest.mark.parametrize("label", [0, 1, 2])
def test_class_weights_act_on_a_single_slide_and_average_to_one(label):
    row, y = LOGITS[:1], torch.tensor([label])
    expected = 100 / (3 * COUNTS[label]) * float(cross_entropy(row, y))
    assert loss("weighted_ce", row, y) == pytest.approx(expected)
    assert sum(n * 100 / (3 * n) for n in COUNTS) == pytest.approx(100)


def test_focal():
    p = softmax(LOGITS[0].tolist())[2], softmax(LOGITS[1].tolist())[0]
    assert loss("focal") == pytest.approx(sum(-((1 - q) ** 2) * math.log(q) for q in p) / 2, rel=1e-5)
    assert loss("focal", focal_gamma=0.0) == pytest.approx(loss("ce"))
    certain = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    make_criterion(TrainingSection(loss="focal", focal_gamma=0.5), COUNTS)(certain, torch.tensor([0])).backward()
    assert certain.grad.isfinite().all()


def test_ldam_takes_the_full_margin_from_the_rarest_class():
    row = LOGITS[:1].tolist()[0]
    for label, margin in ((2, 0.5), (0, 0.5 * (4 / 80) ** 0.25)):
        shifted = [x - margin * (c == label) for c, x in enumerate(row)]
        expected = -math.log(softmax(shifted)[label])
        assert loss("ldam", LOGITS[:1], torch.tensor([label])) == pytest.approx(expected, rel=1e-5)


def test_balanced_softmax_weighs_classes_by_frequency_inside_the_softmax():
    weighted = [n * math.exp(x) for n, x in zip(COUNTS, LOGITS[0].tolist())]
    expected = -math.log(weighted[2] / sum(weighted))
    assert loss("balanced_softmax", LOGITS[:1], LABELS[:1]) == pytest.approx(expected, rel=1e-5)


def test_post_hoc_adjustment_divides_probabilities_by_the_prior():
    adjusted = adjust_logits(LOGITS, log_prior(COUNTS), 1.0).softmax(-1)
    divided = LOGITS.softmax(-1) / torch.tensor([0.8, 0.16, 0.04])
    assert torch.allclose(adjusted, divided / divided.sum(-1, keepdim=True))
    assert torch.equal(adjust_logits(LOGITS, log_prior(COUNTS), 0.0), LOGITS)


@pytest.mark.parametrize("name", ["ce", "weighted_ce", "focal", "ldam", "balanced_softmax"])
def test_criteria_travel_and_bear_absent_classes(name):
    criterion = pickle.loads(pickle.dumps(make_criterion(TrainingSection(loss=name), [5, 0, 3])))
    assert torch.isfinite(criterion(LOGITS, LABELS))
