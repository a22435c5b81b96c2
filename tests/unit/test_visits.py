from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from deco_ray.training.visits import epoch_visits, oversampling_counts

SLIDES = [f"s{index}" for index in range(40)]
LABELS = {slide: 0 if index < 28 else 1 if index < 38 else 2 for index, slide in enumerate(SLIDES)}  # 28, 10, 2


def oracle_counts(train_counts, alpha, cap):
    visits = []
    for count in train_counts:
        exact = (max(train_counts) / count) ** alpha
        nearest = int(exact) + (1 if exact - int(exact) >= 0.5 else 0)
        visits.append(min(max(nearest, 1), cap))
    return visits


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0, 2.0])
@pytest.mark.parametrize("counts", [[500, 120, 31, 9], [10, 10], [3, 1, 2], [1]])
def test_oversampling_follows_equation_12(counts, alpha):
    assert oversampling_counts(counts, alpha, 8) == oracle_counts(counts, alpha, 8)


def test_oversampling_corners():
    assert oversampling_counts([5, 2], 1.0, 8) == [1, 3]  # 2.5 rounds up
    assert oversampling_counts([9, 0], 0.8, 8) == [1, 8]  # no slides: the cap, and nothing to visit
    assert oversampling_counts([9, 0], 0.0, 8) == [1, 1]


def test_an_epoch_visits_every_slide_as_often_as_its_class_asks():
    visits = epoch_visits(SLIDES, LABELS, key=(0, "deco", 3), repeats=[1, 2, 5])
    counts = Counter(visit.slide_id for visit in visits)
    assert counts == {slide: [1, 2, 5][LABELS[slide]] for slide in SLIDES}
    for slide in SLIDES:  # the repeats of a slide are numbered in the order of its visits
        assert [visit.repeat for visit in visits if visit.slide_id == slide] == list(range(counts[slide]))


def test_order_depends_on_the_key_alone():
    first = epoch_visits(SLIDES, LABELS, key=(0, "plain", 3))
    assert first == epoch_visits(SLIDES, LABELS, key=(0, "plain", 3))
    for other in [(1, "plain", 3), (0, "deco", 3), (0, "plain", 4)]:
        assert first != epoch_visits(SLIDES, LABELS, key=other)


@pytest.mark.parametrize(("resampling", "shares"), [("balanced", [1, 1, 1]), ("sqrt", np.sqrt([28, 10, 2]))])
def test_resampling_draws_classes_in_the_stated_proportion(resampling, shares):
    drawn = Counter()
    for epoch in range(150):
        visits = epoch_visits(SLIDES, LABELS, key=(0, "plain", epoch), resampling=resampling)
        assert len(visits) == len(SLIDES)
        drawn.update(LABELS[visit.slide_id] for visit in visits)
    observed = np.array([drawn[label] for label in range(3)])
    assert chisquare(observed, observed.sum() * np.array(shares) / np.sum(shares)).pvalue > 1e-3


def test_partners_are_class_balanced_and_do_not_change_the_order():
    drawn = Counter()
    for epoch in range(150):
        visits = epoch_visits(SLIDES, LABELS, key=(0, "plain", epoch), partners=True)
        drawn.update(LABELS[visit.partner] for visit in visits)
    observed = [drawn[label] for label in range(3)]
    assert chisquare(observed).pvalue > 1e-3
    alone = epoch_visits(SLIDES, LABELS, key=(0, "plain", 149))
    assert [visit.slide_id for visit in alone] == [visit.slide_id for visit in visits]
