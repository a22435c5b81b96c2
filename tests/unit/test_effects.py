"""Contributions against an oracle written from Eq. 5-8, on random, trained and adversarial judges."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deco_ray.anchors.artefact import Anchors
from deco_ray.counterfactual import contributions
from deco_ray.counterfactual.brute import CPU_BATCH_BYTES, batch_size
from deco_ray.counterfactual.effects import log_prior
from deco_ray.counterfactual.explain import explain_bag
from deco_ray.counterfactual.replacements import Replacements, replacements
from deco_ray.counterfactual.row_layers import first_row_layers
from deco_ray.errors import ModelError
from deco_ray.models import create_model
from deco_ray.models.abmil import ABMIL
from deco_ray.models.protocol import Aggregator, SoftmaxPooling

DIM, CLASSES, K = 12, 4, 9
PRIOR = log_prior([40, 20, 7, 3])


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    yield
    torch.set_num_threads(threads)


def oracle(model, bag, assignment, rows, prior, tau=1.0):
    """E' [k, C] in float64 by copying the bag for every non-empty anchor: Eq. 5, 6, 7 and nothing else."""
    model = copy.deepcopy(model).double().eval()
    bag, rows = bag.double(), torch.as_tensor(rows).double()

    def log_probabilities(x):
        return (model(x) - tau * torch.as_tensor(prior)).log_softmax(-1)

    with torch.no_grad():
        before = log_probabilities(bag)
        effects = []
        for k in np.unique(assignment):
            intervened = bag.clone()
            intervened[torch.as_tensor(assignment == k)] = rows[k]
            effects.append(before - log_probabilities(intervened))
    return before.numpy(), torch.stack(effects).numpy()


def close(found, wanted):
    """Within 1e-4 absolute or 1e-4 relative."""
    error = np.abs(found - wanted)
    return bool(((error <= 1e-4) | (error <= 1e-4 * np.abs(wanted))).all())


class Branches(SoftmaxPooling):
    """A softmax-pooling judge with one branch per class and a classifier that is not linear."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__(dim, classes)
        self.value, self.scores = nn.Linear(dim, 10), nn.Linear(dim, classes)
        self.head = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 1))

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        return self.value(bag).relu(), self.scores(bag)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.head(pooled).squeeze(-1)


class Mixing(Aggregator):
    """Patches look at each other: no softmax pooling, and (on request) nothing that can be batched."""

    def __init__(self, dim: int, classes: int, branching: bool = False, in_place: bool = False) -> None:
        super().__init__(dim, classes)
        self.embed, self.key = nn.Linear(dim, 10), nn.Linear(10, 10)
        self.head, self.direct = nn.Linear(10, classes), nn.Linear(dim, classes)
        self.branching, self.in_place = branching, in_place

    def forward(self, bag: Tensor) -> Tensor:
        hidden = self.embed(bag.unsqueeze(0))[0]
        hidden = hidden.relu_() if self.in_place else hidden.relu()
        mixed = (hidden @ self.key(hidden).T).softmax(-1) @ hidden
        if self.branching and bool(mixed.sum() > 1e9):
            raise AssertionError("not reached")
        return self.head(mixed.amax(0)) + self.direct(bag.mean(0)) + bag.amax(0)[: self.classes]

    def attention(self, bag: Tensor) -> Tensor:
        return self.embed(bag).relu().sum(-1)


def judge(kind: str, seed: int) -> Aggregator:
    torch.manual_seed(seed)
    model: Aggregator
    if kind in ("plain", "gated"):
        model = ABMIL(DIM, CLASSES, gated=kind == "gated", hidden=10, attention_dim=5)
    elif kind == "branches":
        model = Branches(DIM, CLASSES)
    else:
        model = Mixing(DIM, CLASSES, branching=kind == "branching", in_place=kind == "in place")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1.0)
    return model.eval()


def slide(seed: int, patches: int = 50, anchors: int = K):
    rng = np.random.default_rng(seed)
    bag = nn.functional.normalize(torch.from_numpy(rng.normal(size=(patches, DIM))).float(), dim=1)
    rows = nn.functional.normalize(torch.from_numpy(rng.normal(size=(anchors, DIM))).float(), dim=1)
    return bag, rng.integers(0, anchors, patches), rows


softmax_judges = st.sampled_from(["plain", "gated", "branches"])
judges = st.sampled_from(["plain", "gated", "branches", "mixing", "branching", "in place"])
seeds = st.integers(0, 10_000)


@settings(max_examples=40, deadline=None)
@given(softmax_judges, seeds, st.integers(1, 80), st.integers(1, K), st.sampled_from([0.0, 0.5, 1.0]))
def test_exact_equals_the_oracle(kind, seed, patches, anchors, tau):
    model, (bag, assignment, rows) = judge(kind, seed), slide(seed, patches, anchors)
    before, effects = oracle(model, bag, assignment, rows, PRIOR, tau)
    found = contributions(model, bag, assignment, rows, PRIOR, label=1, tau=tau, method="exact")
    assert close(found.effects, effects)
    assert found.rival != 1
    assert before[found.rival] > max(before[c] for c in range(CLASSES) if c != 1) - 1e-5  # ties may fall either way
    np.testing.assert_array_equal(found.anchors, np.unique(assignment))
    np.testing.assert_array_equal(found.counts, np.unique(assignment, return_counts=True)[1])
    weights = model.attention(bag).detach().double().numpy()
    np.testing.assert_allclose(found.attention, [weights[assignment == k].mean() for k in found.anchors], rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(judges, seeds, st.integers(1, 80), st.sampled_from([16, 512]))
def test_brute_equals_the_oracle_for_any_judge(kind, seed, patches, cap):
    model, (bag, assignment, rows) = judge(kind, seed), slide(seed, patches)
    _, effects = oracle(model, bag, assignment, rows, PRIOR)
    found = contributions(model, bag, assignment, rows, PRIOR, label=0, method="brute", memory_cap_mb=cap)
    assert close(found.effects, effects)
    weights = model.attention(bag).detach().double().numpy()
    np.testing.assert_allclose(found.attention, [weights[assignment == k].mean() for k in found.anchors], rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(judges, seeds)
def test_identities_of_the_supplement(kind, seed):
    model, (bag, assignment, rows) = judge(kind, seed), slide(seed)
    found = contributions(model, bag, assignment, rows, PRIOR, label=2, tau=0.7)
    own, rival = found.effects[:, found.label], found.effects[:, found.rival]
    with torch.no_grad():
        logits = [model(bag)]
        for k in found.anchors:
            logits.append(model(torch.where(torch.as_tensor(assignment == k)[:, None], rows[k], bag)))
    z = torch.stack(logits).double().numpy()
    log_z = np.log(np.exp(z - 0.7 * PRIOR).sum(1))
    change, change_z = z[0] - z[1:], log_z[0] - log_z[1:]
    np.testing.assert_allclose(found.effects, change - change_z[:, None], atol=1e-4, rtol=1e-4)  # E' = Δz - Δlog Z
    for lam in (0.0, 0.6, 1.0):
        scores = found.scores(lam)
        np.testing.assert_allclose(scores, lam * (own - rival) + (1 - lam) * own, atol=1e-12)
        expected = change[:, found.label] - lam * change[:, found.rival] - (1 - lam) * change_z
        np.testing.assert_allclose(scores, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(judges, seeds)
def test_a_patch_set_replaced_by_itself_contributes_nothing(kind, seed):
    model, (_, assignment, rows) = judge(kind, seed), slide(seed)
    found = contributions(model, rows[assignment], assignment, rows, PRIOR)
    np.testing.assert_allclose(found.effects, 0, atol=2e-5)


@settings(max_examples=20, deadline=None)
@given(judges, seeds)
def test_the_order_of_patches_is_irrelevant(kind, seed):
    model, (bag, assignment, rows) = judge(kind, seed), slide(seed)
    order = np.random.default_rng(seed).permutation(len(bag))
    first = contributions(model, bag, assignment, rows, PRIOR)
    second = contributions(model, bag[order], assignment[order], rows, PRIOR)
    np.testing.assert_allclose(first.effects, second.effects, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(first.attention, second.attention, rtol=1e-3, atol=1e-6)


def trained(gated: bool) -> tuple[Aggregator, Tensor]:
    """A judge taught to tell patches along one axis apart, sharp enough to trust few patches."""
    torch.manual_seed(3)
    model = ABMIL(DIM, CLASSES, gated=gated, hidden=24, attention_dim=8)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    bags = []
    for step in range(120):
        label = step % CLASSES
        bag = torch.randn(40, DIM) * 0.4
        bag[:4, label] += 2.5
        bags.append(nn.functional.normalize(bag, dim=1))
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(bags[-1])[None], torch.tensor([label])).backward()
        optimiser.step()
    return model.eval(), bags[-1]


@pytest.mark.parametrize("gated", [False, True])
def test_exact_on_a_trained_judge(gated):
    model, bag = trained(gated)
    rows = nn.functional.normalize(torch.randn(K, DIM, generator=torch.Generator().manual_seed(1)), dim=1)
    assignment = (bag @ rows.T).argmax(1).numpy()
    _, effects = oracle(model, bag, assignment, rows, PRIOR)
    assert np.abs(effects).max() > 0.1
    assert close(contributions(model, bag, assignment, rows, PRIOR, method="exact").effects, effects)


class Adversarial(SoftmaxPooling):
    """Attention logits are read from the patch's first feature, times `sharpness`."""

    def __init__(self, sharpness: float) -> None:
        super().__init__(DIM, CLASSES)
        self.sharpness = sharpness
        self.head = nn.Linear(DIM, CLASSES)

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        return bag, bag[:, :1] * self.sharpness

    def classify(self, pooled: Tensor) -> Tensor:
        return self.head(pooled.squeeze(-2)) * 5


def adversarial_slides():
    bag, assignment, rows = slide(5, 60)
    flat = bag.clone()
    flat[:, 0] = 0
    one = flat.clone()  # 21 = log(1e9) + a little: anchor 0 keeps all but 1e-9 of the attention
    one[:, 0] = torch.where(torch.as_tensor(assignment == 0), 21.0, 0.0)
    spread = bag.clone()
    spread[:, 0] = torch.linspace(-80, 80, 60)
    sharp_rows = rows.clone()
    sharp_rows[:, 0] = torch.linspace(80, -80, K)
    return {
        "one anchor holds 1 - 1e-9": (one, assignment, rows),
        "logits of ±80": (spread, assignment, sharp_rows),
        "logits of ±80, weak replacements": (spread, assignment, rows),
        "a single anchor": (bag, np.full(60, 4), rows),
        "a single patch": (bag[:1], assignment[:1], rows),
        "all patches alike in one anchor": (bag[:1].expand(60, -1).contiguous(), np.zeros(60, int), rows),
    }


@pytest.mark.parametrize("name", list(adversarial_slides()))
def test_exact_on_adversarial_slides(name):
    bag, assignment, rows = adversarial_slides()[name]
    torch.manual_seed(0)
    model = Adversarial(1.0).eval()
    if name.startswith("one anchor"):
        held = model.attention(bag)[torch.as_tensor(assignment == 0)].double().sum()
        assert 0 <= 1 - float(held) < 1e-6
    _, effects = oracle(model, bag, assignment, rows, PRIOR)
    for method in ("exact", "brute"):
        assert close(contributions(model, bag, assignment, rows, PRIOR, method=method).effects, effects)


@pytest.mark.parametrize("scale", [80.0, -80.0])
def test_exact_on_a_judge_with_attention_logits_of_80(scale):
    model, bag = trained(False)
    with torch.no_grad():
        _, scores = model.instance_terms(bag)
        factor = scale / scores.abs().max()
        model.score.weight *= factor
        model.score.bias *= factor
    rows = nn.functional.normalize(torch.randn(K, DIM, generator=torch.Generator().manual_seed(1)), dim=1)
    assignment = (bag @ rows.T).argmax(1).numpy()
    _, effects = oracle(model, bag, assignment, rows, PRIOR)
    assert close(contributions(model, bag, assignment, rows, PRIOR).effects, effects)


def test_rows_prepared_once_give_the_same_bits_and_dropout_stays_off():
    model, (bag, assignment, rows) = ABMIL(DIM, CLASSES, dropout=0.5).train(), slide(1)
    prepared = Replacements.prepare(model, rows)
    first = contributions(model, bag, assignment, prepared, PRIOR)
    second = contributions(model, bag, assignment, rows.numpy(), PRIOR)
    np.testing.assert_array_equal(first.effects, second.effects)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_row_wise_layers_of_the_bag_are_found_and_given_back():
    model, (bag, assignment, rows) = judge("mixing", 0), slide(0)
    layers, logits = first_row_layers(model, bag)
    assert layers == [model.embed]  # the key layer sees mixed rows, `direct` sees their mean
    torch.testing.assert_close(logits, model(bag))
    contributions(model, bag, assignment, rows, PRIOR, method="brute")
    assert "forward" not in model.embed.__dict__


def test_batches_respect_the_memory_cap():
    assert batch_size(64, 10, 10_000, cuda=False) == 64
    assert batch_size(64, 5000, 10_000, cuda=False) == 2
    assert batch_size(64, CPU_BATCH_BYTES, 10**9, cuda=False) == 1
    assert batch_size(64, CPU_BATCH_BYTES, 10**9, cuda=True) == 64
    assert batch_size(64, 10**9, 10_000, cuda=True) == 1


def test_without_a_label_the_calibrated_prediction_takes_its_place():
    model, (bag, _, rows) = judge("plain", 11), slide(11)
    anchors = Anchors.of(rows.numpy(), rows.numpy()[:3])
    found = explain_bag(model, bag, anchors, PRIOR)
    adjusted = model(bag).detach().numpy() - PRIOR
    assert found.label == int(adjusted.argmax())
    assert found.rival == int(np.argsort(adjusted)[-2])
    np.testing.assert_array_equal(found.anchors, np.unique(anchors.assign(bag)))
    wanted = contributions(model, bag, anchors.assign(bag), anchors.replacements, PRIOR)
    np.testing.assert_array_equal(found.effects, wanted.effects)


def test_constructions_of_the_supplement():
    _, _, rows = slide(2)
    anchors = Anchors.of(rows.numpy(), rows.numpy()[:3])
    np.testing.assert_array_equal(replacements(anchors, "zero"), np.zeros((K, DIM)))
    np.testing.assert_array_equal(replacements(anchors, "anchor"), anchors.anchors)
    np.testing.assert_array_equal(replacements(anchors, "normal"), anchors.normals[anchors.match])


@pytest.mark.parametrize("name", ["clam_sb", "clam_mb", "meanpool", "maxpool", "dsmil", "transmil"])
def test_registered_judges(name):
    torch.manual_seed(0)
    model = create_model(name, 32, CLASSES).eval()
    bag = nn.functional.normalize(torch.randn(30, 32), dim=1)
    assignment, rows = np.arange(30) % K, nn.functional.normalize(torch.randn(K, 32), dim=1)
    _, effects = oracle(model, bag, assignment, rows, PRIOR)
    assert close(contributions(model, bag, assignment, rows, PRIOR).effects, effects)
    assert close(contributions(model, bag, assignment, rows, PRIOR, method="brute").effects, effects)


def test_errors_say_what_is_wrong():
    model, (bag, assignment, rows) = judge("mixing", 0), slide(0)
    with pytest.raises(ModelError, match="softmax"):
        contributions(model, bag, assignment, rows, PRIOR, method="exact")
    with pytest.raises(ModelError, match="one anchor per patch"):
        contributions(model, bag, assignment[:-1], rows, PRIOR)
    with pytest.raises(ModelError, match="only 2 replacements"):
        contributions(model, bag, assignment, rows[:2], PRIOR)
    with pytest.raises(ModelError, match="12-dimensional"):
        contributions(model, bag[:, :5], assignment, rows, PRIOR)
    with pytest.raises(ModelError, match="without training slides"):
        contributions(model, bag, assignment, rows, log_prior([4, 2, 1, 0]))
    with pytest.raises(ModelError, match="no rival"):
        contributions(model, bag, assignment, rows, PRIOR, label=CLASSES)
    assert np.isfinite(contributions(model, bag, assignment, rows, log_prior([4, 2, 1, 0]), tau=0.0).effects).all()
