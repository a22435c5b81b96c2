"""The nested long-tail statistics against a slow reading of the supplement, and its corners."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from deco_ray.keys import generator
from deco_ray.results.longtail import gini, longtail_figure, longtail_table, nested_long_tail, top_tenth

GROUPS = {"head": [1], "medium": [2, 3], "tail": [4]}


def table(seed=0, slides=40, anchors=64, shift=0.0) -> pd.DataFrame:
    rng = generator(seed, "longtail test")
    rows = []
    for number in range(slides):
        label = 1 + number % 4
        present = np.flatnonzero(rng.random(anchors) < 0.5)
        for anchor in present:
            effect = float(rng.normal(shift, 1) ** 3 if shift == 0 else -abs(rng.normal()) - 0.1)
            rows.append((f"s{number}", label, 0, int(anchor), int(rng.integers(1, 99)), effect, 0.0, 0.1))
    names = ["slide_id", "label", "rival", "anchor", "n_patches", "effect_label", "effect_rival", "mean_attention"]
    return pd.DataFrame(rows, columns=names)


def oracle(frame: pd.DataFrame, classes: list[int]):
    """The supplement's sentences, one after another."""
    means, patches = {}, {}
    for anchor in range(frame["anchor"].max() + 1):
        values = []
        for row in frame.itertuples():
            if row.label in classes and row.anchor == anchor:
                values.append(row.effect_label)
                patches[anchor] = patches.get(anchor, 0) + row.n_patches
        if values:
            means[anchor] = sum(values) / len(values)
    ranked = sorted(means, key=lambda anchor: -means[anchor])
    u = sorted(max(value, 0) for value in means.values())
    n, total = len(u), sum(u)
    coefficient = 2 * sum((i + 1) * u[i] for i in range(n)) / (n * total) - (n + 1) / n
    top = ranked[: max(1, int(0.1 * n + 0.5))]
    share = sum(max(means[anchor], 0) for anchor in top) / total
    coverage = sum(patches[anchor] for anchor in top) / sum(patches.values())
    return ranked, [means[anchor] for anchor in ranked], coefficient, share, coverage


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_supplement(seed):
    frame = table(seed, slides=16, anchors=40)
    for entry in nested_long_tail(pa.Table.from_pandas(frame), GROUPS).groups:
        ranked, means, coefficient, share, coverage = oracle(frame, GROUPS[entry.group])
        assert list(entry.anchors) == ranked
        np.testing.assert_allclose(entry.contribution, means, rtol=1e-12)
        np.testing.assert_allclose(
            [entry.gini, entry.top_share, entry.patch_coverage], [coefficient, share, coverage], rtol=1e-12
        )
        assert entry.slides == frame[frame["label"].isin(GROUPS[entry.group])]["slide_id"].nunique()


def test_gini_is_the_area_between_lorenz_curve_and_equality():
    entry = nested_long_tail(table(), GROUPS).groups[0]
    curve = np.array(entry.lorenz)
    assert curve[0] == 0
    assert curve[-1] == 1
    assert (np.diff(np.diff(curve)) >= -1e-12).all()
    area = np.trapezoid(curve, dx=1 / (len(curve) - 1))
    assert entry.gini == pytest.approx(1 - 2 * area, abs=1e-12)


def test_gini_of_known_vectors():
    assert gini(np.ones(7)) == pytest.approx(0)
    assert gini(np.array([0, 0, 0, 5.0])) == pytest.approx(0.75)
    assert gini(np.zeros(3)) is None
    assert gini(np.empty(0)) is None


def test_top_tenth_rounds_halves_up():
    assert [top_tenth(n) for n in (1, 4, 5, 14, 15, 25, 64)] == [1, 1, 1, 1, 2, 3, 6]


def test_invalid_contributions_leave_the_denominator():
    frame = table()
    frame.loc[frame.index[::7], "effect_label"] = np.nan
    assert nested_long_tail(frame, GROUPS) == nested_long_tail(frame.dropna(), GROUPS)


def test_a_group_without_slides_and_one_without_positive_evidence_are_reported_not_fatal():
    frame = table(shift=-1.0)
    analysis = nested_long_tail(frame, {**GROUPS, "tail": [9]})
    head, _, tail = analysis.groups
    assert head.gini is None
    assert head.top_share is None
    assert head.lorenz == ()
    assert 0 < head.patch_coverage < 1
    assert (np.diff(head.contribution) <= 0).all()
    assert tail.anchors == ()
    assert tail.slides == 0
    json.loads(analysis.as_json())
    assert "–" in longtail_table([analysis]).plain()
    longtail_figure([analysis]).canvas.draw()


def test_table_averages_seeds():
    analyses = [nested_long_tail(table(seed), GROUPS) for seed in range(3)]
    shown = longtail_table(analyses).rows[0][3]
    ginis = [analysis.groups[0].gini for analysis in analyses]
    assert shown.mean == pytest.approx(np.mean(ginis))
    assert shown.std == pytest.approx(np.std(ginis, ddof=1))
