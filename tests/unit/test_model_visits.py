"""Second losses of a visit on toys with closed forms: CLAM, DS-MIL, MHIM-MIL, MiCo's centres, MDE-MIL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from deco_ray.errors import ModelError
from deco_ray.models import Partner, create_model
from deco_ray.models.clam import smooth_svm
from deco_ray.models.mhim import RECIPES, Recipe, consistency_loss, extremes, kept_patches

LABEL = torch.tensor(1)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name, **options):
    torch.manual_seed(0)
    return create_model(name, 16, 3, **options)


def visit(model, bag, label=LABEL, **options):
    return model.visit(bag, label, criterion=cross_entropy, **options)


def test_clam_instance_loss_counts_both_ends_for_the_label_and_the_top_for_the_others():
    model = build("clam_sb", k=2).eval()
    values, scores = torch.randn(10, 512), torch.arange(10.0)[:, None]
    heads = model.instance_classifiers

    def ce(c, rows, target):
        return -torch.stack([heads[c](values[row]).log_softmax(0)[target] for row in rows]).mean()

    own = (ce(1, (9, 8), 1) + ce(1, (0, 1), 0)) / 2
    expected = (own + ce(0, (9, 8), 0) + ce(2, (9, 8), 0)) / 3
    assert model.instance_loss(values, scores, 1).item() == pytest.approx(expected.item(), abs=1e-6)
    model.subtyping = False
    assert model.instance_loss(values, scores, 1).item() == pytest.approx(own.item(), abs=1e-6)
    for head in heads:  # undecided classifiers
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
    assert model.instance_loss(values, scores, 1).item() == pytest.approx(math.log(2))


def test_clam_mb_looks_at_each_class_through_its_own_branch():
    model = build("clam_mb", k=1).eval()
    values = torch.randn(6, 512)
    scores = torch.zeros(6, 3)
    scores[4, 0] = scores[2, 1] = scores[5, 2] = 1.0
    scores[0, 1] = -1.0
    heads = model.instance_classifiers
    terms = [
        cross_entropy(heads[0](values[[4]]), torch.tensor([0])),
        cross_entropy(heads[1](values[[2, 0]]), torch.tensor([1, 0])),
        cross_entropy(heads[2](values[[5]]), torch.tensor([0])),
    ]
    assert model.instance_loss(values, scores, 1).item() == pytest.approx(sum(terms).item() / 3, abs=1e-6)


def test_clam_shares_supervision_and_its_instance_loss_reaches_patches_but_not_the_ranking():
    model = build("clam_sb").eval()
    outcome = visit(model, torch.randn(20, 16))
    assert outcome.main_weight == 0.7
    values, scores = torch.randn(20, 512, requires_grad=True), torch.randn(20, 1, requires_grad=True)
    model.instance_loss(values, scores, 0).backward()
    assert values.grad.abs().sum() > 0
    assert scores.grad is None
    for n in (1, 7, 12):  # fewer than k, fewer than 2k
        assert visit(model, torch.randn(n, 16)).extra["instance"].isfinite()


def test_clam_gates_drop_a_quarter_whatever_the_dropout_unless_told():
    def rates(**options):
        return build("clam_sb", **options).gate_branch[2].p

    assert rates(dropout=0.1) == 0.25
    assert rates(dropout=0.0) == 0.0
    assert rates(dropout=0.1, gate_dropout=0.1) == 0.1


def test_smooth_svm_closed_form_and_hard_part():
    scores = torch.tensor([[0.3, -0.2], [9.0, 1.0], [1.0, 9.0]])
    targets = torch.tensor([0, 0, 0])
    expected = [math.log(1 + math.exp(-0.2 + 1 - 0.3)), 0.0, 9.0 + 1 - 1.0]
    assert smooth_svm(scores, targets) == pytest.approx(sum(expected) / 3)
    assert build("clam_sb", instance_loss="svm").instance_criterion is smooth_svm


def test_dsmil_supervises_both_streams_by_halves():
    model, bag = build("dsmil").eval(), torch.randn(12, 16)
    outcome = visit(model, bag)
    highest = model.instance_classifier(bag).max(0).values
    assert outcome.main_weight == 0.5
    assert float(outcome.extra["max_stream"]) == pytest.approx(0.5 * float(cross_entropy(highest, LABEL)))


# --- MHIM-MIL


def test_masks_have_the_sizes_of_the_recipe():
    attention = torch.rand(1, 1000)
    kept = kept_patches(attention, Recipe(0.0, 0.8, 0.03, 0.5, 0.1), 0.0)
    assert len(kept) == 1000 - 800 - 30
    assert (kept.diff() > 0).all()  # original order
    order = attention[0].argsort()
    assert not set(order[:800].tolist()) & set(kept.tolist())
    gone = set(order[-60:].tolist()) - set(kept.tolist())
    assert len(gone) == 30  # half of the candidates
    assert len(kept_patches(attention, Recipe(0.0, 0.8, 0.03, 0.5, 0.1), 0.5)) == 1000 - 800 - 15
    assert len(kept_patches(attention, Recipe(0.0, 0.8, 0.03, 0.5, 0.1), 1.0)) == 200
    assert len(kept_patches(attention, Recipe(0.333, 0.0, 0.0, 1.0, 0.1), 0.0)) == 1000 - 333


@pytest.mark.parametrize(("key", "expected"), [(("c16", "abmil"), 495), (("tcga", "abmil"), 234)])
def test_kept_counts_of_the_published_recipes(key, expected):
    torch.manual_seed(0)
    counts = [len(kept_patches(torch.rand(1, 1000), RECIPES[key], 0.0)) for _ in range(50)]
    assert np.mean(counts) == pytest.approx(expected, abs=3)


@pytest.mark.parametrize("recipe", RECIPES.values())
def test_masking_leaves_at_least_one_patch(recipe):
    for n in range(1, 9):
        assert len(kept_patches(torch.rand(8, n), recipe, 0.0)) >= 1


def test_heads_vote_for_extremes():
    attention = torch.tensor([[9.0, 8.0, 1.0, 0.0], [0.0, 8.0, 9.0, 1.0], [1.0, 9.0, 0.0, 8.0]])
    assert 1 in extremes(attention, 2, largest=True).tolist()
    assert sorted(extremes(attention[:1], 2, largest=True).tolist()) == [0, 1]
    assert sorted(extremes(attention[:1], 2, largest=False).tolist()) == [2, 3]


def test_consistency_starts_near_the_log_of_the_width_and_detaches_the_teacher():
    assert consistency_loss(torch.zeros(512), torch.zeros(512)) == pytest.approx(math.log(512), abs=1e-5)
    one_hot = torch.zeros(4)
    one_hot[2] = 100.0
    feature = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert consistency_loss(one_hot, feature) == pytest.approx(-float(feature.log_softmax(0)[2]), abs=1e-6)
    model = build("mhim").train()
    outcome = visit(model, torch.randn(30, 16))
    outcome.extra["consistency"].backward()
    assert all(p.grad is None and not p.requires_grad for p in model.teacher.parameters())
    assert model.student.embed[0].weight.grad.abs().sum() > 0
    assert float(outcome.extra["consistency"]) == pytest.approx(0.1 * math.log(512), rel=0.05)


def test_the_student_sees_exactly_what_masking_leaves():
    model, bag = build("mhim", mask_random=0.0, mask_low=0.5, mask_high=0.0).eval(), torch.randn(10, 16)
    with torch.no_grad():
        kept = model.attention(bag).argsort()[5:].sort().values
        assert torch.allclose(visit(model, bag).logits, model(bag[kept]), atol=1e-6)


@pytest.mark.parametrize("base", ["abmil", "transmil"])
def test_the_teacher_follows_and_starts_from_the_pretrained_base(base):
    model = build("mhim", base=base, momentum=0.75, recipe="c16" if base == "abmil" else "tcga")
    name, options = model.pretraining()
    torch.manual_seed(3)
    pretrained = create_model(name, 16, 3, **options)
    model.load_pretrained(pretrained.state_dict())
    start = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in pretrained.state_dict().items():
        assert torch.equal(start[f"teacher.{key}"], value)
        if key.startswith("embed"):
            assert torch.equal(start[f"student.{key}"], value)
    assert not torch.equal(start["student.classifier.weight"], pretrained.classifier.weight)
    model.after_step(0.0)
    for key, value in model.teacher.named_parameters():
        assert torch.allclose(value, 0.75 * start[f"teacher.{key}"] + 0.25 * start[f"student.{key}"], atol=1e-6)


def test_cosine_momentum_ends_at_one():
    model = build("mhim", recipe="tcga", momentum=0.5)
    torch.nn.init.zeros_(model.student.classifier.weight)
    torch.nn.init.ones_(model.teacher.classifier.weight)
    model.after_step(1.0)
    assert (model.teacher.classifier.weight == 1).all()
    model.after_step(0.5)
    assert torch.allclose(model.teacher.classifier.weight, torch.tensor(0.75))


# --- MiCo and MDE-MIL


def test_mico_takes_centres():
    model = build("mico")
    centres = torch.randn(model.needs_centres, 16)
    model.set_centres(centres)
    assert torch.equal(model.centres, centres)
    assert model.centres.requires_grad
    with pytest.raises(ModelError, match=r"\(64, 16\), got \(8, 16\)"):
        model.set_centres(centres[:8])


def pair(n=12):
    return torch.randn(n, 16), Partner(torch.randn(9, 16), torch.tensor(2))


def test_mde_losses():
    model, (bag, partner) = build("mde").eval(), pair()
    outcome = visit(model, bag, partner=partner)
    own, other = model.slide_vector(bag)[0], model.slide_vector(partner.bag)[0]
    u, b = model.classifier, model.balanced_expert
    assert torch.allclose(outcome.logits, u(own), atol=1e-6)
    assert torch.allclose(model(bag), (u(own) + b(own)) / 2, atol=1e-6)
    assert torch.allclose(outcome.extra["balanced"], cross_entropy(b(other), partner.label))
    disagreement = ((u(own) - b(own)) ** 2).mean() + ((u(other) - b(other)) ** 2).mean()
    assert torch.allclose(outcome.extra["consistency"], 0.25 * disagreement)
    assert set(outcome.extra) == {"balanced", "consistency"}
    b.load_state_dict(u.state_dict())
    assert visit(model, bag, partner=partner).extra["consistency"] == 0
    with pytest.raises(ModelError, match="partner"):
        visit(model, bag)


def test_mde_aggregator_learns_from_both_slides():
    model, (bag, partner) = build("mde").eval(), pair()
    for name in ("logits", "balanced"):
        model.zero_grad()
        outcome = visit(model, bag, partner=partner)
        (cross_entropy(outcome.logits, LABEL) if name == "logits" else outcome.extra[name]).backward()
        assert model.embed[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_mde_text_branch(tmp_path, suffix):
    texts = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    path = tmp_path / f"texts.{suffix}"
    np.save(path, texts) if suffix == "npy" else np.savetxt(path, texts, delimiter=",")
    model, (bag, partner) = build("mde", text_embeddings=str(path)).eval(), pair()
    outcome = visit(model, bag, partner=partner)
    losses = []
    for slide, label in ((bag, LABEL), (partner.bag, partner.label)):
        z = model.text.project(model.slide_vector(slide)[0])
        cosines = torch.nn.functional.cosine_similarity(z[None], torch.from_numpy(texts), dim=1)
        losses.append(cross_entropy(cosines / 0.07, label))
    assert torch.allclose(outcome.extra["text"], sum(losses) / 2, atol=1e-4)
    outcome.extra["text"].backward()
    assert model.text.offset.grad.abs().sum() > 0
    assert not model.text.embeddings.requires_grad
    # a trained model loads and predicts where the file is not, but does not train there
    path.unlink()
    elsewhere = build("mde", text_embeddings=str(path)).eval()
    with pytest.raises(ModelError, match="no class text embeddings at"):
        visit(elsewhere, bag, partner=partner)
    elsewhere.load_state_dict(model.state_dict())
    assert torch.equal(elsewhere(bag), model(bag))


@pytest.mark.parametrize(
    ("content", "message"),
    [(np.ones((2, 16)), "need \\(3, 16\\)"), (np.zeros((3, 16)), "zero"), (np.array([object()]), "cannot be read")],
)
def test_mde_refuses_other_text_files(tmp_path, content, message):
    np.save(tmp_path / "texts.npy", content, allow_pickle=True)
    with pytest.raises(ModelError, match=message):
        build("mde", text_embeddings=str(tmp_path / "texts.npy"))
