"""Localisation figures against a count over pairs, and on a cohort whose lesion patches are known."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from deco_ray.anchors.artefact import Anchors
from deco_ray.cohort.store import Bag
from deco_ray.counterfactual.explain import explain_bag
from deco_ray.errors import CohortError
from deco_ray.models.protocol import SoftmaxPooling
from deco_ray.results.localisation import LESIONS, Localiser, by_class, load_instances, localise

PRIOR = np.log([1 / 3, 1 / 3, 1 / 3])


class KnowsTheAxis(SoftmaxPooling):
    """Logits are the pooled features of axes 0-2 and attention is uniform: contributions see what attention cannot."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3)
        self.gain = nn.Parameter(torch.tensor(20.0))

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        return bag, torch.zeros(len(bag), 1)

    def classify(self, pooled: Tensor) -> Tensor:
        return pooled.squeeze(-2)[..., :3] * self.gain


def bag_of(label: int, lesion: np.ndarray, dim: int = 8) -> Bag:
    rng = np.random.default_rng(0)
    features = rng.normal(0, 0.1, (len(lesion), dim)).astype(np.float32)
    features[:, 5] += 1
    features[lesion > 0, :3] = 3 * np.eye(3)[lesion[lesion > 0]]
    rows = torch.from_numpy(features)
    return Bag("s", rows / rows.norm(dim=1, keepdim=True), None, label)


def pair_auroc(positive, scores):
    pairs = itertools.product(scores[positive], scores[~positive])
    return np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])


def test_figures_of_one_slide():
    lesion = np.repeat([0, 1, 2], [30, 6, 4])
    bag = bag_of(2, lesion)
    anchors = Anchors.of(bag.features.numpy()[[0, 31, 37, 8]], bag.features.numpy()[[3, 4]])
    model = KnowsTheAxis(8)
    measured = Localiser(model, anchors, PRIOR, lam=0.3)(bag, lesion)
    found = explain_bag(model, bag.features, anchors, PRIOR, label=2)
    position = np.searchsorted(found.anchors, anchors.assign(bag.features))
    counted = lesion != 1  # the other lesion counts neither way
    positive = lesion[counted] == 2
    assert measured["contribution_auroc"] == pair_auroc(positive, found.effects[position, 2][counted]) == 1.0
    assert measured["score_auroc"] == pytest.approx(pair_auroc(positive, found.scores(0.3)[position][counted]))
    assert measured["attention_auroc"] == 0.5
    assert measured["attention_ap"] == pytest.approx(measured["lesion_share"]) == pytest.approx(4 / 34)


def test_slides_without_both_kinds_are_left_out():
    lesion = np.zeros(20, int)
    bag = bag_of(1, lesion)
    localiser = Localiser(KnowsTheAxis(8), Anchors.of(bag.features.numpy()[:2], bag.features.numpy()[:1]), PRIOR)
    assert localiser(bag, lesion) is None
    assert localiser(bag, np.ones(20, int)) is None


def test_a_cohort_with_known_lesions(tiny_cohort, tmp_path):
    truth = {}
    for slide, label, n in tiny_cohort.slides[["slide_id", "label", "n_patches"]].itertuples(index=False):
        truth[slide] = np.where(np.arange(n) < max(2, n // 6), label, 0)  # as the tiny cohort was made
    np.savez(tmp_path / "instances.npz", **truth)
    instances = load_instances(tiny_cohort, tmp_path / "instances.npz")
    assert set(instances) == set(tiny_cohort.slides["slide_id"])
    centres = np.concatenate([tiny_cohort.bag(slide).features.numpy()[:1] for slide in instances])
    normal = tiny_cohort.bag("s0_000").features.numpy()[-2:]
    model = KnowsTheAxis(tiny_cohort.dim)
    slides = localise(tiny_cohort, instances, instances, Localiser(model, Anchors.of(centres, normal), PRIOR))
    table = by_class(slides, tiny_cohort.classes)
    assert list(table["class"]) == ["b", "c", "all"]
    assert list(table["slides"]) == [9, 8, 17]
    assert table["contribution_auroc"].min() > 0.8
    assert set(table["attention_auroc"]) == {0.5}
    assert table["contribution_auroc"].iloc[-1] == pytest.approx(slides["contribution_auroc"].mean())


def test_lesions_of_a_synthetic_cohort(tiny_cohort, tmp_path, monkeypatch):
    with pytest.raises(CohortError, match="not known"):
        load_instances(tiny_cohort)
    (tmp_path / "instances").mkdir()
    rows = {"slide_id": ["s1_000", "s1_000"], "patch": [0, 4], "lesion": [1, 2]}
    pq.write_table(pa.table(rows), tmp_path / LESIONS)
    monkeypatch.setattr(tiny_cohort, "uri", str(tmp_path))
    instances = load_instances(tiny_cohort)
    assert list(np.flatnonzero(instances["s1_000"])) == [0, 4]
    assert instances["s1_000"][4] == 2
    assert not instances["s2_000"].any()
    np.savez(tmp_path / "short.npz", s1_000=np.zeros(3, int))
    np.savez(tmp_path / "number.npz", s1_000=np.int64(1))
    with pytest.raises(CohortError, match="slide s1_000 has 1 entries"):
        load_instances(tiny_cohort, tmp_path / "number.npz")
    with pytest.raises(CohortError, match="slide s1_000 has 3 entries"):
        load_instances(tiny_cohort, tmp_path / "short.npz")


def test_a_file_that_is_no_npz_of_classes_is_named(tiny_cohort, tmp_path):
    np.savez(tmp_path / "whole.npz", s1_000=np.zeros(300, int))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.npz").write_bytes(whole.replace(bytes(64), bytes(63) + b"x", 1))
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.npz").write_text("slide,class")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "words.npz", s1_000=np.array(["tumour"]))
    np.savez(tmp_path / "objects.npz", s1_000=np.array([None]))
    names = "cut.npz flipped.npz empty.npz text.npz array.npy words.npz objects.npz absent.npz"
    for name in names.split():
        with pytest.raises(CohortError, match=rf"cannot read .*{name}.* as numpy\.savez writes it"):
            load_instances(tiny_cohort, tmp_path / name)
