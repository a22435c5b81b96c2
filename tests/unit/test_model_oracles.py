"""Each aggregator against a slow, obvious version written from its equations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as f

from deco_ray.models import create_model
from deco_ray.models.nystrom import NystromAttention
from deco_ray.models.ppeg import PPEG


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_and_bag(name, n=23, dim=24, **options):
    torch.manual_seed(0)
    return create_model(name, dim, 4, **options).double().eval(), torch.randn(n, dim, dtype=torch.float64)


def check(model, bag, logits, attention=None, atol=1e-10):
    with torch.no_grad():
        assert torch.allclose(model(bag), logits, atol=atol)
        if attention is not None:
            assert torch.allclose(model.attention(bag), attention, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("gated", [False, True])
def test_abmil(gated):
    model, bag = model_and_bag("abmil", gated=gated)
    h = [torch.relu(model.embed[0](x)) for x in bag]
    e = []
    for row in h:
        hidden = torch.tanh(model.tanh_branch(row))
        e.append(model.score(hidden * torch.sigmoid(model.gate_branch(row)) if gated else hidden))
    total = sum(s.exp() for s in e)
    a = [s.exp() / total for s in e]
    check(model, bag, model.classifier(sum(w * row for w, row in zip(a, h))), torch.cat(a))


@torch.no_grad()
def test_clam_mb_has_a_pooling_per_class_and_with_equal_branches_is_clam_sb():
    model, bag = model_and_bag("clam_mb")
    h = torch.relu(model.embed[0](bag))
    e = model.score(torch.tanh(model.tanh_branch[0](h)) * torch.sigmoid(model.gate_branch[0](h)))
    logits, rows = [], []
    for c in range(4):
        a = e[:, c].exp() / e[:, c].exp().sum()
        z = sum(a[n] * h[n] for n in range(len(bag)))
        logits.append(model.classifier.weight[c] @ z + model.classifier.bias[c])
        rows.append(a)
    logits = torch.stack(logits)
    check(model, bag, logits, rows[int(logits.argmax())])
    single, _ = model_and_bag("clam_sb")
    state = model.state_dict() | {"score.weight": model.score.weight[:1], "score.bias": model.score.bias[:1]}
    single.load_state_dict(state)
    model.score.weight.copy_(model.score.weight[:1].expand(4, -1))
    model.score.bias.copy_(model.score.bias[:1].expand(4))
    check(model, bag, single(bag))


@torch.no_grad()
def test_dsmil():
    model, bag = model_and_bag("dsmil")
    c = torch.stack([model.instance_classifier(x) for x in bag])

    def query(x):
        return torch.tanh(model.query[2](torch.relu(model.query[0](x))))

    pooled, columns = [], []
    for j in range(4):
        critical = max(range(len(bag)), key=lambda n: c[n, j])
        scores = torch.stack([query(x) @ query(bag[critical]) / math.sqrt(128) for x in bag])
        a = scores.exp() / scores.exp().sum()
        columns.append(a)
        pooled.append(sum(a[n] * bag[n] for n in range(len(bag))))
    # the head is a convolution over C channels whose kernel spans all features
    kernel = model.classifier.weight.view(4, 4, 24)
    logits = f.conv1d(torch.stack(pooled)[None], kernel, model.classifier.bias)[0, :, 0]
    check(model, bag, logits, columns[int(logits.argmax())])
    assert torch.allclose(model.streams(bag)[1], c.max(0).values)
    model.query[2].weight.zero_()
    model.query[2].bias.zero_()
    mean = bag.mean(0).repeat(4)
    check(model, bag, model.classifier(mean), torch.full((len(bag),), 1 / len(bag), dtype=torch.float64))


def slow_nystrom(layer, tokens):
    """The Nyström equations with every matrix written out; outputs [L, dim] and F G⁺ B [h, L, L] on real tokens."""
    length, m, heads = len(tokens), layer.landmarks, layer.heads
    padded = torch.cat([tokens.new_zeros((-length % m, tokens.shape[1])), tokens])
    q, k, v = layer.qkv(padded).chunk(3, dim=1)
    total, width = len(padded), q.shape[1] // heads
    q = q / math.sqrt(width)
    group = total // m
    split = [slice(h * width, (h + 1) * width) for h in range(heads)]
    g_all, f_all, b_all = [], [], []
    for part in split:
        qm = torch.stack([q[i * group : (i + 1) * group, part].mean(0) for i in range(m)])
        km = torch.stack([k[i * group : (i + 1) * group, part].mean(0) for i in range(m)])
        f_all.append((q[:, part] @ km.T).softmax(1))
        g_all.append((qm @ km.T).softmax(1))
        b_all.append((qm @ k[:, part].T).softmax(1))
    largest_row = max(g.abs().sum(1).max() for g in g_all)
    largest_column = max(g.abs().sum(0).max() for g in g_all)
    eye = torch.eye(m, dtype=tokens.dtype)
    outs, maps = [], []
    for h, part in enumerate(split):
        g, z = g_all[h], g_all[h].T / (largest_row * largest_column)
        for _ in range(6):
            z = z @ (13 * eye - g @ z @ (15 * eye - g @ z @ (7 * eye - g @ z))) / 4
        attention = f_all[h] @ z @ b_all[h]
        value = v[:, part]
        mixed = torch.zeros_like(value)
        for tap in range(33):
            for i in range(total):
                if 0 <= i + tap - 16 < total:
                    mixed[i] += layer.value_conv.weight[h, 0, tap, 0] * value[i + tap - 16]
        outs.append(attention @ value + mixed)
        maps.append(attention[-length:, -length:])
    return layer.out(torch.cat(outs, 1))[-length:], torch.stack(maps)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5, 15, 16, 17, 37])
def test_nystrom_attention(length):
    torch.manual_seed(0)
    layer = NystromAttention(12, heads=2, head_dim=6, landmarks=8).double().eval()
    tokens = torch.randn(length, 12, dtype=torch.float64)
    expected, maps = slow_nystrom(layer, tokens)
    out, row = layer(tokens, first_row=True)
    assert torch.allclose(out, expected, atol=1e-10)
    assert torch.allclose(row, maps[:, 0], atol=1e-10)
    assert torch.allclose(layer(tokens, rows=1)[0], expected[:1], atol=1e-10)


@torch.no_grad()
def test_nystrom_of_a_short_sequence_is_close_to_exact_attention_over_zero_keys_too():
    torch.manual_seed(0)
    layer = NystromAttention(dropout=0.0).eval()
    layer.value_conv.weight.zero_()
    tokens = torch.randn(10, 512)
    q, k, v = (part.view(256, 8, 64).transpose(0, 1) for part in f.pad(layer.qkv(tokens), (0, 0, 246, 0)).chunk(3, 1))
    exact = ((q @ k.mT / 8).softmax(-1) @ v).transpose(0, 1).flatten(1)
    assert (layer(tokens)[0] - layer.out(exact)[-10:]).abs().max() < 1e-2


def slow_ppeg(ppeg, square):  # [s², D]
    side = math.isqrt(len(square))
    grid = square.T.reshape(1, -1, side, side)
    out = grid
    for conv, margin in ((ppeg.conv7, 3), (ppeg.conv5, 2), (ppeg.conv3, 1)):
        out = out + f.conv2d(grid, conv.weight, conv.bias, padding=margin, groups=grid.shape[1])
    return out[0].flatten(1).T


@torch.no_grad()
def test_ppeg_is_identity_plus_three_convolutions():
    ppeg = PPEG(6).double()
    tokens = torch.randn(25, 6, dtype=torch.float64)
    assert torch.allclose(ppeg(tokens), slow_ppeg(ppeg, tokens))
    assert torch.allclose(ppeg(tokens[:20]), slow_ppeg(ppeg, torch.cat([tokens[:20], tokens[:5]]))[:20])
    ppeg.least_side = 7
    filled = torch.cat([tokens[:20], tokens[:5], tokens.new_zeros((24, 6))])
    assert torch.allclose(ppeg(tokens[:20]), slow_ppeg(ppeg, filled)[:20])


def slow_skeleton(model, bag, layer):
    """Class-token skeleton; `layer(module, tokens)` gives outputs and attention maps of one attention layer."""
    h = torch.relu(model.embed[0](bag))
    side = math.ceil(math.sqrt(len(bag)))
    tokens = torch.cat([model.cls, h, h[: side * side - len(bag)]])
    tokens = tokens + layer(model.first_layer, model.first_norm(tokens))[0]
    tokens = torch.cat([tokens[:1], slow_ppeg(model.ppeg, tokens[1:])])
    change, maps = layer(model.last_layer, model.last_norm(tokens))
    logits = model.classifier(model.norm(tokens + change)[0])
    return logits, maps.mean(0)[0, 1 : len(bag) + 1]


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 7, 23])
def test_transmil(n):
    model, bag = model_and_bag("transmil", n, hidden=12, heads=2, landmarks=8)
    check(model, bag, *slow_skeleton(model, bag, slow_nystrom))


def slow_agents(layer, tokens):
    dim, heads = tokens.shape[1], layer.heads
    width, agents = dim // heads, layer.agents.shape[1]
    q, k, v = (tokens @ layer.qkv.weight.T).chunk(3, 1)
    z, r, s = [], [], []
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        r.append((q[:, part] @ layer.agents[h].T / math.sqrt(width)).softmax(1))
        s.append((layer.agents[h] @ k[:, part].T).softmax(1))
        z.append(s[h] @ v[:, part])
    flat = torch.stack(z).flatten()  # [head, agent, channel], cut into rows of `dim` as it lies
    rows = [flat[i * dim : (i + 1) * dim] for i in range(agents)]
    tau = torch.sigmoid(torch.stack([layer.threshold(row) for row in rows]).mean())
    outs = []
    for h in range(heads):
        mask = (torch.sigmoid(layer.mask(z[h])) > tau).double()
        outs.append(r[h] @ (z[h] * mask + torch.sigmoid(layer.denoise(z[h]))).softmax(1))
    return torch.cat(outs, 1), torch.stack([r[h] @ s[h] for h in range(heads)])


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 9, 23])
def test_amdmil(n):
    model, bag = model_and_bag("amdmil", n, hidden=12, heads=2, agents=6)
    check(model, bag, *slow_skeleton(model, bag, slow_agents))
    heads = model.first_layer(torch.randn(8, 12, dtype=torch.float64))[0].view(8, 2, 6)
    assert torch.allclose(heads.sum(-1), torch.ones(8, 2, dtype=torch.float64))
    assert (heads > 0).all()


@torch.no_grad()
def test_amdmil_can_give_each_agent_its_own_row():
    model, _ = model_and_bag("amdmil", hidden=12, heads=2, agents=6, agent_rows=True)
    layer, z = model.first_layer, torch.randn(2, 6, 6, dtype=torch.float64)
    tau = torch.sigmoid(torch.stack([layer.threshold(z[:, a].flatten()) for a in range(6)]).mean())
    mask = (torch.sigmoid(layer.mask(z)) > tau).double()
    assert torch.allclose(layer.masked(z), (z * mask + torch.sigmoid(layer.denoise(z))).softmax(-1))


def slow_wikg(model, bag, score):
    h = f.leaky_relu(model.embed[0](bag))
    h = 0.5 * (h + h.mean(0))
    e, t = model.head(h), model.tail(h)
    updated = []
    for n in range(len(bag)):
        similarity = t @ e[n] / math.sqrt(e.shape[1])
        best = sorted(range(len(bag)), key=lambda i: -float(similarity[i]))[:6]
        p = similarity[best].softmax(0)
        u = []
        for j, i in enumerate(best):
            gate = torch.tanh(e[n] + p[j] * t[i] + (1 - p[j]) * e[n])
            u.append(t[i].sum() * gate.sum() if score == "sums" else t[i] @ gate)
        context = torch.stack(u).softmax(0) @ t[best]
        updated.append(
            f.leaky_relu(model.sum_update(e[n] + context)) + f.leaky_relu(model.product_update(e[n] * context))
        )
    updated = torch.stack(updated)
    a = torch.full((len(bag),), 1 / len(bag), dtype=bag.dtype)
    if model.gate is not None:
        a = torch.stack([model.gate(row)[0] for row in updated]).softmax(0)
    return model.classifier(model.norm(a @ updated)), a


@torch.no_grad()
@pytest.mark.parametrize(
    ("n", "pool", "score"), [(1, "attention", "sums"), (4, "mean", "sums"), (23, "attention", "dot")]
)
def test_wikg(n, pool, score):
    model, bag = model_and_bag("wikg", n, hidden=16, pool=pool, score=score)
    check(model, bag, *slow_wikg(model, bag, score))


def test_wikg_in_slices_is_the_same_with_the_same_gradients(monkeypatch):
    model, bag = model_and_bag("wikg", 23, hidden=16)
    outcomes = []
    for rows in (1024, 5):
        monkeypatch.setattr("deco_ray.models.wikg.ROWS", rows)
        model.zero_grad()
        logits = model(bag)
        logits[1].backward()
        outcomes.append((logits.detach(), model.tail.weight.grad.clone(), model.head.weight.grad.clone()))
    for whole, sliced in zip(*outcomes):
        assert torch.allclose(whole, sliced, atol=1e-12)


def slow_multihead(module, q, k, v):
    width, heads = module.embed_dim, module.num_heads
    wq, wk, wv = module.in_proj_weight.chunk(3)
    bq, bk, bv = module.in_proj_bias.chunk(3)
    q, k, v = q @ wq.T + bq, k @ wk.T + bk, v @ wv.T + bv
    outs, maps = [], []
    for h in range(heads):
        part = slice(h * width // heads, (h + 1) * width // heads)
        a = (q[:, part] @ k[:, part].T / math.sqrt(width // heads)).softmax(1)
        outs.append(a @ v[:, part])
        maps.append(a)
    return module.out_proj(torch.cat(outs, 1)), torch.stack(maps).mean(0)


@torch.no_grad()
@pytest.mark.parametrize(("rank", "norm"), [(1, True), (3, False)])
def test_ilra(rank, norm):
    model, bag = model_and_bag("ilra", rank=rank, norm=norm, width=16, heads=2)

    def block(layer, queries, keys):
        q = layer.q(queries)
        attended, weights = slow_multihead(layer.attend, q, layer.k(keys), layer.v(keys))
        out = q + attended
        out = layer.norm_attended(out) if norm else out
        out = out + torch.relu(layer.mix(out))
        out = layer.norm_mixed(out) if norm else out
        return (out * f.silu(layer.gate(queries)) if layer.gate is not None else out), weights

    x = bag
    for i in range(2):
        low, _ = block(model.gather[i], model.latents[i], x)
        assert low.shape == (rank, 16)
        x, weights = block(model.spread[i], x, low)
        assert rank > 1 or (weights == 1).all()
    z, weights = block(model.pool, model.seed, x)
    check(model, bag, model.classifier(z[0]), weights[0])


@torch.no_grad()
def test_mhim_of_mil_baseline_is_full_self_attention_read_at_the_class_token():
    model, bag = model_and_bag("mhim", variant="milbaseline")
    tokens = model.norm(torch.cat([model.cls, torch.relu(model.embed[0](bag))]))
    out, maps = slow_multihead(model.attend, tokens, tokens, tokens)
    check(model, bag, model.classifier(out[0]), maps[0, 1:])


@torch.no_grad()
def test_mico():
    model, bag = model_and_bag("mico", hidden=16)
    model.temperature.fill_(0.7)
    patches, clusters = f.leaky_relu(model.embed_patches[0](bag)), f.leaky_relu(model.embed_centres[0](model.centres))
    for i in range(3):
        routes = []
        for p in patches:
            routes.append(torch.stack([-torch.linalg.norm(p - c) / 0.7 for c in clusters]).softmax(0))
        assert torch.allclose(model.route(patches, clusters), torch.stack(routes))
        patches = model.norms[i](patches + torch.stack(routes) @ clusters)
        patches = patches + model.mixers[i][3](torch.relu(model.mixers[i][0](patches)))
        reduce = model.reducers[i]
        clusters = torch.stack([reduce[2](torch.relu(reduce[0](column))) for column in clusters.T]).T
    assert len(clusters) == 8
    values = model.project[3](torch.relu(model.project[0](torch.cat([patches, clusters]))))
    e = model.score(torch.tanh(model.tanh_branch[0](values)) * torch.sigmoid(model.gate_branch[0](values)))[:, 0]
    a = e.softmax(0)
    check(model, bag, model.classifier(torch.relu(model.compress[0](a @ values))), a[: len(bag)])


def test_mico_routes_hard_with_soft_gradients():
    model, bag = model_and_bag("mico", hidden=16, hard=True)
    patches = model.embed_patches(bag).detach().requires_grad_()
    clusters = model.embed_centres(model.centres)
    routes = model.route(patches, clusters)
    assert torch.allclose(routes.max(1).values, torch.ones(len(bag), dtype=torch.float64))
    assert torch.allclose(routes.sum(1), torch.ones(len(bag), dtype=torch.float64))
    (routes * torch.randn_like(routes)).sum().backward()
    assert patches.grad.abs().sum() > 0
