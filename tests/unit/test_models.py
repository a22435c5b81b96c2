"""The checklist every aggregator passes: sizes, shapes, symmetries, determinism, gradients, one protocol."""

from __future__ import annotations

import io

import pytest
import torch
from torch.nn.functional import cross_entropy

from deco_ray.errors import ModelError
from deco_ray.models import Partner, SoftmaxPooling, create_model, display_name, model_names, parameter_count

NAMES = model_names()
VARIANTS = {
    **{name: (name, {}) for name in NAMES},
    "abmil gated": ("abmil", {"gated": True}),
    "mhim transmil": ("mhim", {"base": "transmil"}),
    "mhim milbaseline": ("mhim", {"variant": "milbaseline"}),
    "wikg mean": ("wikg", {"pool": "mean"}),
    "ilra r64": ("ilra", {"rank": 64}),
    "dsmil values": ("dsmil", {"passing_v": True}),
}
# the same wiring, narrow enough to try on many bags
SMALL = {
    "meanpool": {"hidden": 32},
    "maxpool": {"hidden": 32},
    "abmil": {"hidden": 32, "attention_dim": 8},
    "clam_sb": {"hidden": 32, "attention_dim": 8},
    "clam_mb": {"hidden": 32, "attention_dim": 8},
    "dsmil": {"query_dim": 8},
    "transmil": {"hidden": 32, "heads": 2, "landmarks": 16},
    "ilra": {"width": 16, "heads": 2},
    "mhim": {},
    "mico": {"hidden": 32},
    "amdmil": {"hidden": 32, "heads": 2, "agents": 16},
    "wikg": {"hidden": 32},
    "mde": {"hidden": 32, "attention_dim": 8},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(variant, dim=512, small=False, **options):
    torch.manual_seed(0)
    name, fixed = VARIANTS[variant]
    narrow = SMALL[name] if small else {}
    return create_model(name, dim, 4, **{**narrow, **fixed, **options}).eval()


def bag_of(n, dim=512, seed=1):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def visit(model, bag, label=1, sub_bags=(), **options):
    partner = Partner(bag_of(9, bag.shape[1], 2).to(bag.dtype), torch.tensor(2)) if model.needs_partner else None
    return model.visit(bag, torch.tensor(label), sub_bags, criterion=cross_entropy, partner=partner, **options)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("abmil", {}, 330_501),
        ("abmil", {"gated": True}, 396_165),
        ("clam_sb", {}, 531_725),
        ("clam_mb", {}, 532_496),
        ("dsmil", {}, 92_424),
        ("dsmil", {"passing_v": True}, 355_080),
        ("dsmil", {"linear_query": True}, 75_912),
        ("transmil", {}, 2_411_028),
        ("ilra", {}, 3_163_908),
        ("ilra", {"norm": False}, 3_158_788),
        ("ilra", {"rank": 64}, 3_196_164),
        ("mhim", {}, 330_372),
        ("mhim", {"base": "transmil"}, 2_411_028),
        ("mhim", {"variant": "milbaseline"}, 1_316_868),
        ("mico", {}, 3_199_535),
        ("amdmil", {}, 2_164_998),
        ("wikg", {}, 1_842_181),
        ("wikg", {"pool": "mean"}, 1_710_596),
        ("mde", {}, 398_217),
    ],
)
def test_parameter_counts_to_the_unit(name, options, count):
    assert parameter_count(create_model(name, 512, 4, **options)) == count


@pytest.mark.parametrize("name", NAMES)
def test_shapes_from_one_patch_to_a_thousand(name):
    model = build(name, dim=24, small=True)
    with torch.no_grad():
        for n in (1, 2, 5, 7, 8, 15, 16, 100, 255, 256, 257, 1000):
            bag = bag_of(n, 24)
            logits, attention = model(bag), model.attention(bag)
            assert logits.shape == (4,)
            assert attention.shape == (n,)
            assert logits.isfinite().all()
            assert attention.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_full_width_shapes(variant):
    model = build(variant)
    with torch.no_grad():
        for n in (1, 6):
            assert model(bag_of(n)).shape == (4,)
            assert model.attention(bag_of(n)).shape == (n,)


SUMS_TO_ONE = {"meanpool", "maxpool", "abmil", "abmil gated", "clam_sb", "clam_mb", "dsmil", "dsmil values"} | {
    "ilra", "ilra r64", "mhim", "wikg", "wikg mean", "mde",
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_sums(variant):
    with torch.no_grad():
        total = build(variant, 32, small=True).attention(bag_of(30, 32)).sum()
    if variant in SUMS_TO_ONE:
        assert total == pytest.approx(1, abs=1e-5)
    elif variant in ("mico", "amdmil", "mhim milbaseline"):  # the rest is on cluster, class or padding tokens
        assert 0 < total < 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_permutation(variant):
    model, bag = build(variant, 32, small=True), bag_of(23, 32)
    shuffled = bag[torch.randperm(23, generator=torch.Generator().manual_seed(3))]
    with torch.no_grad():
        change = (model(bag) - model(shuffled)).abs().max()
    if variant in ("transmil", "amdmil", "mhim transmil"):
        assert change > 1e-3
    else:
        assert change < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_duplication(variant):
    model, bag = build(variant, 32, small=True), bag_of(23, 32)
    with torch.no_grad():
        change = (model(bag) - model(bag.repeat(2, 1))).abs().max()
    if variant in ("transmil", "amdmil", "mico", "wikg", "wikg mean", "mhim milbaseline", "mhim transmil"):
        assert change > 1e-5
    else:
        assert change < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_eval_repeats_and_training_drops_out(variant):
    model, bag = build(variant, 32, small=True), bag_of(12, 32)
    with torch.no_grad():
        assert torch.equal(model(bag), model(bag))
        model.train()
        drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
        assert torch.equal(model(bag), model(bag)) != drops
        assert drops == (variant.split()[0] in ("clam_sb", "clam_mb", "transmil", "mhim", "mico", "amdmil", "wikg"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_visit_of_one_patch_trains_and_the_label_stays_out_of_the_logits(variant):
    model = build(variant, 32, small=True).train()
    for n in (1, 3):
        visits = []
        for label in (0, 3, 3):
            torch.manual_seed(5)
            visits.append(visit(model, bag_of(n, 32), label))
        assert torch.equal(visits[0].logits, visits[1].logits)
        losses = [cross_entropy(v.logits, torch.tensor(3)) + sum(v.extra.values()) for v in visits[1:]]
        assert losses[0] == losses[1]  # all randomness is torch's, so a visit's seed decides it
        losses[0].backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pseudo_bags_of_a_visit_are_forwards_of_their_patches(variant):
    model, bag = build(variant, 32, small=True), bag_of(20, 32)
    sub_bags = [torch.arange(0, 20, 2), torch.tensor([3, 4, 5]), torch.tensor([7])]
    with torch.no_grad():
        outcome = visit(model, bag, sub_bags=sub_bags)
        expected = torch.stack([model(bag[members]) for members in sub_bags])
        assert torch.allclose(outcome.sub_logits, expected, atol=1e-5)
        assert torch.allclose(model.sub_bag_logits(bag, sub_bags), expected, atol=1e-5)
        assert visit(model, bag).sub_logits.shape == (0, 4)
        if variant.split()[0] != "mde" and variant not in ("mhim", "mhim transmil"):  # expert u; a masked bag
            assert torch.allclose(outcome.logits, model(bag), atol=1e-5)


POOLING = [v for v in VARIANTS if isinstance(build(v, 8, small=True), SoftmaxPooling)]


def test_which_models_are_softmax_poolings():
    assert set(POOLING) == {"meanpool", "abmil", "abmil gated", "clam_sb", "clam_mb", "mhim", "mde"}


@pytest.mark.parametrize("variant", POOLING)
def test_one_instance_pass_serves_many_bags_with_the_same_gradients(variant):
    model, bag = build(variant, dim=32), bag_of(30, 32)
    members = [torch.arange(15), torch.arange(10, 30, 3), torch.tensor([2])]
    coefficients = bag_of(4, 4, 7)
    gradients = []
    for logits in (
        model.pool_many(*model.instance_terms(bag), members),
        torch.stack([model(bag), *(model(bag[chosen]) for chosen in members)]),
    ):
        model.zero_grad()
        (logits * coefficients).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-5), name


def dead_parameters(model, **options):
    """Names of trainable parameters whose gradient is None or vanishes, in double precision."""
    model = model.double()
    outcome = visit(model, bag_of(40, model.dim).double(), **options)
    (cross_entropy(outcome.logits, torch.tensor(1)) + sum(outcome.extra.values())).backward()
    return {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or p.grad.abs().max() < 1e-14)
    }


AMD_DEAD = {f"{layer}_layer.{part}.{kind}" for layer in ("first", "last") for part in ("mask", "threshold")
            for kind in ("weight", "bias")}  # fmt: skip
ILRA_KEY_BIASES = {"gather.0.k.bias", "gather.1.k.bias", "pool.k.bias"}
DEAD = {
    "meanpool": set(),
    "maxpool": set(),
    "abmil": {"score.bias"},  # shifts all scores alike, and softmax does not see it
    "abmil gated": {"score.bias"},
    "clam_sb": {"score.bias"},
    "clam_mb": {"score.bias"},
    "dsmil": set(),
    "dsmil values": set(),
    "transmil": set(),
    "ilra": ILRA_KEY_BIASES | {f"spread.{i}.k.{kind}" for i in (0, 1) for kind in ("weight", "bias")},
    "ilra r64": ILRA_KEY_BIASES | {"spread.0.k.bias", "spread.1.k.bias"},
    "mhim": set(),  # attention without biases
    "mhim transmil": set(),
    "mhim milbaseline": set(),
    "mico": {"similarity_bias", "score.bias"},
    "amdmil": AMD_DEAD,
    "wikg": {f"unused_gates.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")} | {"gate.2.bias"},
    "wikg mean": {f"unused_gates.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")},
    "mde": {"score.bias"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_dead_parameters_are_the_known_ones_and_no_others(variant):
    assert dead_parameters(build(variant, dim=32, small=True)) == DEAD[variant]


def test_ilra_of_rank_one_gives_its_spreading_queries_and_keys_no_gradient():
    model = build("ilra", dim=32, small=True)
    model(bag_of(40, 32)).sum().backward()
    for layer in model.spread:
        assert (layer.attend.in_proj_weight.grad[:32] == 0).all()
        assert (layer.attend.in_proj_weight.grad[32:] != 0).any()


def test_clam_without_subtyping_trains_the_instance_classifier_of_the_label_alone():
    dead = dead_parameters(build("clam_sb", dim=32, subtyping=False), label=1)
    assert dead == {"score.bias"} | {f"instance_classifiers.{c}.{k}" for c in (0, 2, 3) for k in ("weight", "bias")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_travels_through_a_safe_file(variant):
    model = build(variant, dim=32, small=True)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.manual_seed(9)
    name, fixed = VARIANTS[variant]
    other = create_model(name, 32, 4, **{**SMALL[name], **fixed}).eval()
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        assert torch.equal(model(bag_of(11, 32)), other(bag_of(11, 32)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_classifier_parameters_are_the_last_layer(variant):
    model = build(variant, dim=32, small=True)
    own = {id(p) for p in model.parameters() if p.requires_grad}
    classifier = model.classifier_parameters()
    assert {id(p) for p in classifier} <= own
    assert sum(p.numel() for p in classifier if p.ndim == 1) == (8 if variant == "mde" else 4)
    model(bag_of(9, 32)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in classifier)


def test_names_in_tables():
    assert display_name("abmil") == "AB-MIL"
    assert display_name("abmil", {"gated": True}) == "AB-MIL (gated)"
    assert display_name("mhim", {"base": "transmil"}) == "MHIM-MIL (TransMIL)"
    assert display_name("mhim", {"variant": "milbaseline"}) == "MHIM-MIL (MIL_BASELINE)"
    assert display_name("mde") == "MDE-MIL (no text)"
    assert display_name("mde", {"text_embeddings": "texts.npy"}) == "MDE-MIL"


def test_unknown_names_options_and_choices_are_refused():
    with pytest.raises(ModelError, match="did you mean 'transmil'"):
        create_model("transmill", 8, 3)
    with pytest.raises(ModelError, match=r"no option 'depth'; its options: rank"):
        create_model("ilra", 8, 3, depth=3)
    with pytest.raises(ModelError, match=r"pool = 'max': choose one of attention, mean"):
        create_model("wikg", 8, 3, pool="max")
