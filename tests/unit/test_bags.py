from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from deco_ray.errors import DecoError
from deco_ray.keys import generator
from deco_ray.training.bags import equal_quotas, pseudo_bags, reduce_bag

K = 6


def half_up(value):
    """Nearest integer of a decimal as people write it, halves up."""
    return (
        int(Fraction(str(value)) + Fraction(1, 2)) if not isinstance(value, Fraction) else int(value + Fraction(1, 2))
    )


def share(ratio, size):
    return half_up((1 - Fraction(str(ratio))) * size)


bags = st.lists(st.integers(0, K - 1), min_size=1, max_size=60).map(np.array)
ratio = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9])


@settings(max_examples=80, deadline=None)
@given(bags, st.lists(ratio, min_size=K, max_size=K), st.integers(0, 99))
def test_reduced_bag_keeps_the_share_of_every_anchor(assignment, ratios, seed):
    kept = reduce_bag(assignment, np.array(ratios), generator(seed))
    expected = {k: share(ratios[k], int((assignment == k).sum())) for k in range(K)}
    if sum(expected.values()) == 0:  # DESIGN: one patch of the best-scored (least masked) anchor
        present = [k for k in range(K) if (assignment == k).any()]
        expected[min(present, key=lambda k: ratios[k])] = 1
    assert {k: int((assignment[kept] == k).sum()) for k in range(K)} == expected
    assert (np.diff(kept) > 0).all()


@settings(max_examples=80, deadline=None)
@given(
    bags, st.sampled_from(["stratified", "random", "equal"]), st.sampled_from([0.1, 0.3, 0.5, 1.0]), st.integers(0, 99)
)
def test_pseudo_bags_follow_their_definition(assignment, strategy, rho, seed):
    rng = generator(seed)
    kept = reduce_bag(assignment, np.full(K, 0.3), rng)
    made = pseudo_bags(assignment, kept, rho, 3, rng, strategy)
    sizes = {k: int((assignment[kept] == k).sum()) for k in range(K) if (assignment[kept] == k).any()}
    assert len(made) == 3
    for bag in made:
        assert set(bag) <= set(kept)
        assert (np.diff(bag) > 0).all()
        taken = {k: int((assignment[bag] == k).sum()) for k in sizes}
        if strategy == "stratified":
            assert taken == {k: max(1, half_up(Fraction(str(rho)) * size)) for k, size in sizes.items()}
        total = half_up(Fraction(str(rho)) * len(kept))
        if strategy == "random":
            assert len(bag) == max(1, total)
        if strategy == "equal":
            assert len(bag) == max(len(sizes), total)
            assert all(1 <= taken[k] <= sizes[k] for k in sizes)
            roomy = [taken[k] for k in sizes if taken[k] < sizes[k]]  # anchors that could give more
            assert not roomy or max(taken.values()) - min(roomy) <= 1


def test_nothing_masked_keeps_everything_and_no_pseudo_bag_is_fine():
    assignment = np.array([0, 0, 2, 5, 5, 5])
    kept = reduce_bag(assignment, np.zeros(K), generator(0))
    assert kept.tolist() == list(range(6))
    assert pseudo_bags(assignment, kept, 0.5, 0, generator(0)) == []


def test_halves_round_up_even_where_floating_point_falls_short():
    assert len(reduce_bag(np.zeros(5, int), np.array([0.9]), generator(0))) == 1  # (1 - 0.9) * 5 = 0.4999…
    assert len(reduce_bag(np.zeros(15, int), np.array([0.9]), generator(0))) == 2


def test_small_anchors_pass_their_quota_on():
    assert sorted(equal_quotas(np.array([1, 0, 9, 10]), 0.5, generator(0)).tolist()) == [0, 1, 4, 5]
    assert equal_quotas(np.array([2, 2]), 1.0, generator(0)).tolist() == [2, 2]


def test_draws_depend_on_the_generator_alone():
    assignment = generator(1).integers(0, K, 50)
    first = reduce_bag(assignment, np.full(K, 0.5), generator(7))
    assert np.array_equal(first, reduce_bag(assignment.astype(np.int16), np.full(K, 0.5), generator(7)))
    assert not np.array_equal(first, reduce_bag(assignment, np.full(K, 0.5), generator(8)))


def subset_counts(draw, universe, repeats=3000):
    """How often each possible subset came up."""
    seen = dict.fromkeys(universe, 0)
    for index in range(repeats):
        seen[tuple(draw(generator("subset", index)).tolist())] += 1
    return list(seen.values())


def test_reduced_bags_are_uniform_over_all_subsets():
    from itertools import combinations

    assignment = np.array([1, 0, 1, 0, 1, 1])  # keeps 1 of {1, 3} and 2 of {0, 2, 4, 5}: 12 equally likely bags
    universe = [tuple(sorted((a, *b))) for a in (1, 3) for b in combinations((0, 2, 4, 5), 2)]
    counts = subset_counts(lambda rng: reduce_bag(assignment, np.array([0.5, 0.5]), rng), universe)
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(
    ("strategy", "universe"),
    [
        ("stratified", [(0, 2), (0, 3), (1, 2), (1, 3)]),
        ("random", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        ("equal", [(0, 2), (0, 3), (1, 2), (1, 3)]),
    ],
)
def test_pseudo_bags_are_uniform_over_all_subsets(strategy, universe):
    assignment = np.array([0, 0, 1, 1])
    counts = subset_counts(lambda rng: pseudo_bags(assignment, np.arange(4), 0.5, 1, rng, strategy)[0], universe)
    assert chisquare(counts).pvalue > 1e-3


def test_pseudo_bags_of_a_visit_are_independent():
    assignment = np.array([0, 0])
    pairs = [
        tuple(int(bag[0]) for bag in pseudo_bags(assignment, np.arange(2), 0.5, 2, generator(i))) for i in range(2000)
    ]
    counts = [pairs.count(pair) for pair in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    assert chisquare(counts).pvalue > 1e-3


def test_an_unknown_strategy_is_named():
    with pytest.raises(DecoError, match="stratified, random, equal"):
        pseudo_bags(np.zeros(3, int), np.arange(3), 0.5, 1, generator(0), "fancy")
