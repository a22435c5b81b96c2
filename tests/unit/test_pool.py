"""The clustering pool: fair quotas, keyed draws, nothing from other slides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deco_ray.anchors.pool import ANCHORS, NORMALS, Draw, draw, quotas
from deco_ray.cohort.store import Bag
from deco_ray.errors import CohortError


def slow_quotas(sizes: dict[str, int], cap: int) -> dict[str, int]:
    """Deal one patch at a time, round after round, in sorted slide order, until the cap or nothing is left."""
    given = dict.fromkeys(sorted(sizes), 0)
    while cap and any(given[slide] < sizes[slide] for slide in sizes):
        for slide in given:
            if cap and given[slide] < sizes[slide]:
                given[slide] += 1
                cap -= 1
    return given


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 200))
def test_quotas_are_those_of_dealing_one_patch_at_a_time(sizes, cap):
    named = {f"s{(7 * index) % len(sizes)}_{index}": size for index, size in enumerate(sizes)}
    assert quotas(named, cap) == slow_quotas(named, cap)


def test_quotas_do_not_depend_on_the_order_of_slides():
    sizes = {"b": 5, "a": 100, "c": 40}
    assert quotas(sizes, 60) == quotas(dict(reversed(sizes.items())), 60) == {"a": 28, "b": 5, "c": 27}


def test_a_draw_is_ascending_without_repeats_and_depends_on_its_key_only():
    chosen = draw(3, ANCHORS, "slide", 1000, 200)
    assert len(np.unique(chosen)) == 200
    assert (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(chosen, draw(3, ANCHORS, "slide", 1000, 200))
    for other in [(4, ANCHORS, "slide"), (3, NORMALS, "slide"), (3, ANCHORS, "slide2")]:
        assert not np.array_equal(chosen, draw(*other, 1000, 200))


def test_a_full_quota_takes_every_patch():
    np.testing.assert_array_equal(draw(0, ANCHORS, "slide", 17, 17), np.arange(17))


def test_draws_are_spread_over_the_whole_slide():
    hits = np.zeros(100)
    for slide in range(400):
        hits[draw(0, ANCHORS, f"s{slide}", 100, 10)] += 1
    # 40 expected for each position, standard deviation 6: taking the first patches would give 400 and 0
    assert hits.min() > 40 - 5 * 6
    assert hits.max() < 40 + 5 * 6


def test_a_slide_gives_rows_only_to_the_pools_that_plan_it():
    bag = Bag("s", torch.eye(6), None, 1)
    drawn = Draw(0, {ANCHORS: {"s": 4}, NORMALS: {"other": 2}})(bag)
    assert drawn.keys() == {ANCHORS}
    np.testing.assert_array_equal(drawn[ANCHORS], np.eye(6)[draw(0, ANCHORS, "s", 6, 4)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_patches_are_refused_even_when_not_drawn(value):
    features = torch.eye(6)
    features[5, 2] = value
    with pytest.raises(CohortError, match="slide s: patch 5 is a zero vector or not finite, as are 0 more of its 6"):
        Draw(0, {ANCHORS: {"s": 0}})(Bag("s", features, None, 1))
