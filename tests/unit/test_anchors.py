"""The anchors artefact: contract of `Anchors`, matching, assignments on disk, pool plan, figure."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from deco_ray.anchors import Anchors, stage
from deco_ray.anchors.assignments import Assign, load_assignments, load_counts, write_assignments
from deco_ray.anchors.figure import anchor_figure, project
from deco_ray.anchors.matching import match_normals
from deco_ray.anchors.pool import ANCHORS, NORMALS
from deco_ray.anchors.stage import anchor_inputs, plan_pools, write_pools
from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort.splits import new_split
from deco_ray.config import AnchorSection
from deco_ray.errors import CohortError, DecoError
from deco_ray.keys import generator


def unit(*shape: int, seed: int = 0) -> np.ndarray:
    rows = generator(seed, "unit rows").normal(size=shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture
def anchors() -> Anchors:
    return Anchors.of(unit(7, 16, seed=1), unit(4, 16, seed=2))


def slow_nearest(rows: np.ndarray, prototypes: np.ndarray) -> np.ndarray:
    """Eq. 4 one patch at a time: the prototype with the largest cosine."""
    found = []
    for row in rows.astype(np.float64):
        cosines = [row @ p / np.linalg.norm(row) / np.linalg.norm(p) for p in prototypes.astype(np.float64)]
        found.append(int(np.argmax(cosines)))
    return np.array(found)


def test_each_anchor_is_matched_to_its_cosine_nearest_normal(anchors):
    np.testing.assert_array_equal(anchors.match, slow_nearest(anchors.anchors, anchors.normals))
    np.testing.assert_array_equal(anchors.replacements, anchors.normals[anchors.match])
    assert anchors.match.dtype == np.int64


def test_equal_normals_match_the_first():
    assert match_normals(np.eye(3)[:1], np.eye(3)[[1, 0, 0]]).tolist() == [1]


@pytest.mark.parametrize(
    "convert", [np.asarray, torch.from_numpy, lambda x: np.float64(x) * 7, lambda x: x[:, ::-1][:, ::-1]]
)
def test_patches_go_to_the_cosine_nearest_anchor(anchors, convert):
    rows = unit(300, 16)
    found = anchors.assign(convert(rows))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, slow_nearest(rows, anchors.anchors))


def test_an_empty_bag_has_an_empty_assignment(anchors):
    assert anchors.assign(np.empty((0, 16), np.float32)).shape == (0,)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_patch_without_a_direction_is_refused_by_number(anchors, value):
    rows = unit(9, 16)
    rows[4] = value
    with pytest.raises(DecoError, match="patch 4 is a zero vector or not finite"):
        anchors.assign(rows)


def test_a_patch_at_right_angles_to_all_anchors_is_not_refused():
    assert Anchors.of(np.eye(4, dtype=np.float32)[:2], np.eye(4, dtype=np.float32)).assign(np.eye(4)[3:]).tolist() == [
        0
    ]


def test_features_of_another_dimension_are_refused(anchors):
    with pytest.raises(DecoError, match=r"features \[5, 8\] do not fit anchors of dimension 16"):
        anchors.assign(unit(5, 8))


def test_saved_anchors_load_from_folder_and_file(anchors, tmp_path):
    anchors.save(tmp_path)
    for path in (tmp_path, str(tmp_path / "anchors.npz")):
        loaded = Anchors.load(path)
        for name in ("anchors", "normals", "match", "replacements"):
            np.testing.assert_array_equal(getattr(loaded, name), getattr(anchors, name))


def test_missing_and_damaged_anchors_say_what_to_do(tmp_path):
    with pytest.raises(DecoError, match="run the anchors stage first"):
        Anchors.load(tmp_path)
    (tmp_path / "anchors.npz").write_bytes(b"not an archive")
    with pytest.raises(DecoError, match="damaged"):
        Anchors.load(tmp_path)


def archive(**arrays) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_anchors_that_are_cut_off_or_something_else_name_their_file(anchors, tmp_path):
    path = tmp_path / "anchors.npz"
    anchors.save(tmp_path)
    whole, plain = path.read_bytes(), io.BytesIO()
    np.save(plain, anchors.anchors)
    arrays = {"anchors": anchors.anchors, "normals": anchors.normals, "match": anchors.match}
    damaged = [b"", whole[:10], whole[: len(whole) // 2], whole[:60] + b"xxxx" + whole[64:], plain.getvalue()]
    damaged += [archive(anchors=anchors.anchors), archive(**{**arrays, "match": anchors.match + 99})]
    damaged += [archive(**{**arrays, "normals": anchors.normals[:, 1:]})]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(DecoError, match=r"anchors\.npz is damaged: .*; remove its folder and run"):
            Anchors.load(tmp_path)


def test_assignments_come_back_with_their_counts(tmp_path):
    rng = generator(0, "assignments")
    slides = [(f"s{index}", index % 3, rng.integers(0, 5, 10 + index)) for index in range(600)]
    write_assignments(tmp_path, 5, iter(slides))
    loaded = load_assignments(tmp_path)
    counts, labels = load_counts(tmp_path)
    assert list(loaded) == list(counts.index) == [slide for slide, _, _ in slides]
    for slide, label, assignment in slides:
        np.testing.assert_array_equal(loaded[slide], assignment)
        assert labels[slide] == label
    expected = np.array([[(assignment == anchor).sum() for anchor in range(5)] for _, _, assignment in slides])
    np.testing.assert_array_equal(counts.to_numpy(), expected)
    assert loaded["s0"].dtype == np.int16


def test_an_assignment_that_changed_is_noticed(tmp_path):
    store = ArtefactStore(tmp_path)
    with store.writing("anchors", "k", {}) as folder:
        write_assignments(folder, 5, [("s0", 1, np.arange(5).repeat(40))])
    path = store.path("anchors", "k") / "assignments.parquet"
    assert len(load_assignments(path.parent)["s0"]) == 200
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(DecoError, match=r"assignments\.parquet: it is not what was written.*remove its folder"):
        load_assignments(path.parent)


def training_split(cohort, without_label=None):
    labels = dict(zip(cohort.slides["slide_id"], cohort.slides["label"]))
    parts = {slide: "val" if index % 4 == 0 else "train" for index, slide in enumerate(labels)}
    return new_split(cohort, "some", {s: "unused" if labels[s] == without_label else p for s, p in parts.items()}, {})


def test_pools_are_planned_from_training_slides_and_normals_from_normal_ones(tiny_cohort):
    split = training_split(tiny_cohort)
    section = AnchorSection(k=4, k_normal=2, pool_per_anchor=50)
    plan = plan_pools(tiny_cohort, split.ids("train"), section)
    assert sorted(plan[ANCHORS]) == sorted(split.ids("train"))
    assert all(tiny_cohort.row(slide)["label"] == 0 for slide in plan[NORMALS])
    assert sum(plan[ANCHORS].values()) == 200
    assert sum(plan[NORMALS].values()) == 100


def test_a_pool_that_is_not_whole_is_drawn_again(tiny_cohort, tmp_path, monkeypatch):
    plan = plan_pools(tiny_cohort, training_split(tiny_cohort).ids("train"), AnchorSection(k=4, k_normal=2))
    passes, flushed = [], []

    def map_bags(cohort, slides, function, verify, label):
        passes.append(label)
        assert verify  # here the features of training slides enter the method
        return ((slide, function(cohort.bag(slide))) for slide in slides)

    monkeypatch.setattr(stage, "map_bags", map_bags)
    monkeypatch.setattr(os, "fsync", flushed.append)
    path = write_pools(tiny_cohort, plan, 0, tmp_path)[ANCHORS]
    assert len(flushed) == 2  # both, before they get their names
    whole = path.read_bytes()
    assert np.load(path).shape == (sum(plan[ANCHORS].values()), tiny_cohort.dim)
    for damaged in (b"", whole[:40], whole[:-1], whole + b"0", whole.replace(b"<f4", b"<i4"), bytes(len(whole))):
        path.write_bytes(damaged)
        write_pools(tiny_cohort, plan, 0, tmp_path)
        assert path.read_bytes() == whole
    write_pools(tiny_cohort, plan, 0, tmp_path)
    assert len(passes) == 7  # the last one was reused


def test_a_training_split_without_normal_slides_is_refused_with_the_numbers(tiny_cohort):
    split = training_split(tiny_cohort, without_label=0)
    with pytest.raises(CohortError, match=r"none of the \d+ training slides is of the normal class 'a'"):
        plan_pools(tiny_cohort, split.ids("train"), AnchorSection())


def test_how_the_work_is_spread_is_not_an_input(tiny_cohort):
    split = training_split(tiny_cohort)
    inputs = anchor_inputs(tiny_cohort, split, AnchorSection())
    assert inputs == anchor_inputs(tiny_cohort, split, AnchorSection(backend="sharded", workers=3))
    for changed in ({"k": 8}, {"k_normal": 8}, {"pool_per_anchor": 5}, {"iterations": 3}, {"seed": 1}):
        assert inputs != anchor_inputs(tiny_cohort, split, AnchorSection(**changed))


def test_the_map_keeps_distances_of_a_plane_and_has_a_fixed_sign():
    flat = np.zeros((20, 9), np.float32)
    flat[:, [2, 5]] = generator(0, "plane").normal(size=(20, 2))
    places, explained = project(flat)
    np.testing.assert_allclose(explained.sum(), 1.0)
    between = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    np.testing.assert_allclose(np.linalg.norm(places[:, None] - places[None], axis=2), between, atol=1e-5)
    np.testing.assert_allclose(places, project(flat)[0])
    np.testing.assert_allclose(places, -project(-flat)[0], atol=1e-6)


def test_the_figure_shows_sizes_classes_and_the_map(tiny_cohort, anchors, tmp_path):
    anchors.save(tmp_path)
    assign = Assign(anchors)
    slides = list(zip(tiny_cohort.slides["slide_id"], tiny_cohort.slides["label"]))
    write_assignments(tmp_path, 7, ((s, label, assign(tiny_cohort.bag(s))["assignment"]) for s, label in slides))
    figure = anchor_figure(tmp_path, tiny_cohort)
    sizes, mixture, scatter = figure.axes
    heights = [bar.get_height() for bar in sizes.patches]
    assert heights == sorted(heights, reverse=True)
    assert sum(heights) == tiny_cohort.slides["n_patches"].sum()
    tops = np.array([[bar.get_height() for bar in container] for container in mixture.containers])
    np.testing.assert_allclose(tops.sum(axis=0), 1.0)
    assert [text.get_text() for text in mixture.get_legend().get_texts()] == list(tiny_cohort.classes)
    assert len(scatter.collections[0].get_segments()) == 7  # a line from each anchor to its normal
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


def test_k_means_workers_need_neither_torch_nor_ray_data():
    code = "import sys, deco_ray.anchors.kmeans; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
