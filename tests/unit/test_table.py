"""The contribution table: its rows, its file, and the ratios of a whole split."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from deco_ray.artefacts import ArtefactStore
from deco_ray.config import CounterfactualSection, MaskingSection
from deco_ray.counterfactual import Contributions, masking_ratios
from deco_ray.counterfactual.table import (
    TABLE,
    contribution_inputs,
    join_rows,
    read_table,
    slide_ratios,
    slide_rows,
    write_table,
)
from deco_ray.errors import DecoError

K = 6


def found(label: int, anchors: list[int], seed: int = 0) -> Contributions:
    rng = np.random.default_rng(seed)
    k = len(anchors)
    return Contributions(
        np.array(anchors), rng.integers(1, 9, k), rng.normal(size=(k, 3)), rng.random(k), label, 2 - label, np.zeros(3)
    )


@pytest.fixture
def two_slides():
    return {"b": found(2, [0, 3, 5]), "a": found(0, [1], seed=1)}


@pytest.fixture
def table(two_slides):
    return join_rows(slide_rows(slide, one) for slide, one in two_slides.items())


def test_one_row_per_slide_and_anchor(table, two_slides):
    assert table.schema == TABLE
    rows = table.to_pandas()
    assert list(rows["slide_id"]) == ["b", "b", "b", "a"]
    assert list(rows["anchor"]) == [0, 3, 5, 1]
    b = two_slides["b"]
    np.testing.assert_array_equal(rows["effect_label"][:3], b.effects[:, 2])
    np.testing.assert_array_equal(rows["effect_rival"][:3], b.effects[:, 0])
    np.testing.assert_array_equal(rows["n_patches"][:3], b.counts)
    np.testing.assert_array_equal(rows["mean_attention"][:3], b.attention)
    assert join_rows([]).num_rows == 0


def test_file_keeps_every_bit(table, tmp_path):
    write_table(table, tmp_path)
    assert read_table(tmp_path).equals(table)
    (tmp_path / "contributions.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DecoError, match="score again"):
        read_table(tmp_path)


def test_a_bit_that_changed_in_a_finished_table_is_noticed(table, tmp_path):
    """Other effects would train other final models, and nobody would know."""
    store = ArtefactStore(tmp_path)
    with store.writing("contributions", "k", {}) as folder:
        write_table(table, folder)
    path = store.path("contributions", "k") / "contributions.parquet"
    whole = path.read_bytes()
    assert read_table(path.parent).equals(table)
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DecoError, match="score again"):
            read_table(path.parent)


@pytest.mark.parametrize("form", ["table", "frame", "folder"])
def test_ratios_of_a_split(form, table, two_slides, tmp_path):
    source = {"table": table, "frame": table.to_pandas(), "folder": write_table(table, tmp_path).parent}[form]
    section = MaskingSection(lam=0.3, r_max=0.9)
    ratios = slide_ratios(source, {"normal": 1, "a": 0, "b": 2}, 1, section, seed=0, k=K)
    assert list(ratios) == ["normal", "a", "b"]
    np.testing.assert_array_equal(ratios["normal"], np.zeros(K))
    np.testing.assert_array_equal(ratios["a"], [0, 0.9, 0, 0, 0, 0])  # one anchor: Norm = 0
    b = two_slides["b"]
    wanted = np.zeros(K)
    wanted[b.anchors] = masking_ratios(b.scores(0.3), 0.9)
    np.testing.assert_array_equal(ratios["b"], wanted)
    assert ratios["b"].dtype == np.float64


def test_rows_in_another_order_give_the_same_ratios(table):
    frame = table.to_pandas()
    labels = {"a": 0, "b": 2}
    for strategy in ("counterfactual", "random", "size", "attention"):
        section = MaskingSection(strategy=strategy)
        first = slide_ratios(frame, labels, 1, section, 0, K)
        second = slide_ratios(frame.iloc[::-1].reset_index(drop=True), labels, 1, section, 0, K)
        for slide in labels:
            np.testing.assert_array_equal(first[slide], second[slide])


def test_a_slide_without_rows_is_an_error_unless_nothing_is_masked(table):
    with pytest.raises(DecoError, match="slide lost"):
        slide_ratios(table, {"lost": 2}, 1, MaskingSection(), 0, K)
    ratios = slide_ratios(table, {"lost": 2}, 1, MaskingSection(strategy="none"), 0, K)
    np.testing.assert_array_equal(ratios["lost"], np.zeros(K))
    with pytest.raises(DecoError, match="only 4 anchors"):
        slide_ratios(table, {"b": 2}, 1, MaskingSection(), 0, 4)


def test_an_empty_table_serves_a_split_of_normal_slides():
    empty = pd.DataFrame({name: [] for name in TABLE.names})
    np.testing.assert_array_equal(slide_ratios(empty, {"n": 1}, 1, MaskingSection(), 0, K)["n"], np.zeros(K))


def test_the_digest_inputs_know_tau_and_construction_but_not_lambda():
    section = CounterfactualSection()
    base = contribution_inputs("anchors", "judge", section)
    assert base != contribution_inputs("anchors", "judge", section.model_copy(update={"tau": 0.0}))
    assert base != contribution_inputs("anchors", "judge", section.model_copy(update={"construction": "zero"}))
    assert base != contribution_inputs("anchors", "other", section)
    assert not {"lam", "r_max"} & set(base)
