"""Masking ratios against Eq. 9 and the supplement's definitions of the compared strategies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deco_ray.config import MaskingSection
from deco_ray.counterfactual import masking_ratios
from deco_ray.counterfactual.ratios import anchor_ratios, attention_ratios, size_ratios

scores = st.lists(st.floats(-50, 50), min_size=1, max_size=64)


def eq_9(values, r_max, eps=1e-8):
    low, high = min(values), max(values)
    return [r_max * (1 - (value - low) / (high - low + eps)) for value in values]


@settings(max_examples=60, deadline=None)
@given(scores, st.floats(0, 0.99))
def test_eq_9(values, r_max):
    ratios = masking_ratios(values, r_max)
    np.testing.assert_allclose(ratios, eq_9(values, r_max), atol=1e-12)
    assert ((ratios >= 0) & (ratios <= r_max)).all()
    assert ratios[int(np.argmin(values))] == r_max
    assert (np.diff(ratios[np.argsort(values)]) <= 0).all()  # higher contribution, lower ratio


def test_equal_scores_all_get_the_maximum():
    np.testing.assert_array_equal(masking_ratios([0.3, 0.3, 0.3], 0.9), [0.9, 0.9, 0.9])
    np.testing.assert_array_equal(masking_ratios([-7.0], 0.5), [0.5])
    assert len(masking_ratios([], 0.5)) == 0


def test_size_masks_large_anchors():
    np.testing.assert_allclose(size_ratios([2, 10, 6], 0.8), [0.0, 0.8, 0.4])
    np.testing.assert_array_equal(size_ratios([5, 5], 0.8), [0, 0])
    np.testing.assert_array_equal(size_ratios([5], 0.8), [0])


def test_attention_masks_little_attended_anchors():
    np.testing.assert_allclose(attention_ratios([0.1, 0.3, 0.2], 0.8), [0.8, 0.0, 0.4])
    np.testing.assert_array_equal(attention_ratios([0.2, 0.2], 0.8), [0, 0])
    np.testing.assert_array_equal(attention_ratios([0.2, 0.2 * (1 + 1e-12)], 0.8), [0, 0])  # rounding is no spread
    np.testing.assert_array_equal(attention_ratios([0.0, 0.0], 0.8), [0, 0])


@settings(max_examples=30, deadline=None)
@given(scores, st.integers(0, 99))
def test_random_permutes_the_causal_ratios(values, seed):
    counts, attention = np.ones(len(values)), np.ones(len(values))
    section = MaskingSection(strategy="random", r_max=0.9)
    drawn = anchor_ratios(section, np.array(values), counts, attention, seed, "s")
    assert sorted(drawn) == sorted(masking_ratios(values, 0.9))
    np.testing.assert_array_equal(drawn, anchor_ratios(section, np.array(values), counts, attention, seed, "s"))


def test_random_differs_between_slides_and_seeds():
    section, values, ones = MaskingSection(strategy="random"), np.arange(20.0), np.ones(20)
    draws = {tuple(anchor_ratios(section, values, ones, ones, seed, slide)) for seed in (0, 1) for slide in "ab"}
    assert len(draws) == 4


@pytest.mark.parametrize("strategy", ["none", "size", "attention", "counterfactual", "random"])
def test_every_strategy_stays_within_the_maximum(strategy):
    rng = np.random.default_rng(0)
    section = MaskingSection(strategy=strategy, r_max=0.7)
    ratios = anchor_ratios(section, rng.normal(size=9), rng.integers(1, 50, 9), rng.random(9), 0, "s")
    assert ratios.shape == (9,)
    assert ratios.max() == pytest.approx(0.0 if strategy == "none" else 0.7)
    assert ratios.min() >= 0
