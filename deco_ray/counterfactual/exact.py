"""All interventions of a slide from one instance pass, for models that pool by a softmax-weighted sum.

The slide is treated as k super-instances, one per non-empty anchor j: log-weight lw_j = logsumexp of its
scores and mean μ_j = attention-weighted mean of its values. Intervention k replaces (lw_k, μ_k) by
(log |G_k| + score(b_k), value(b_k)). Nothing is ever subtracted from a total, so an anchor that holds nearly
all the attention costs no digits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from deco_ray.counterfactual.outcomes import Outcomes, anchor_means
from deco_ray.models.protocol import SoftmaxPooling


def exact_outcomes(
    model: SoftmaxPooling,
    bag: Tensor,
    segment: np.ndarray,
    counts: np.ndarray,
    replaced: tuple[Tensor, Tensor],
) -> Outcomes:
    """Logits of the slide and of its k interventions, from one pass over its patches.

    bag [N, d]; segment [N] in 0..k-1; counts [k]; instance terms of the k replacement rows: [k, D], [k, B].
    """
    values, scores = model.instance_terms(bag)  # [N, D], [N, B]
    members = torch.from_numpy(segment).to(bag.device)
    sizes = torch.from_numpy(counts).to(bag.device, torch.float64)
    log_weights, means = super_instances(values, scores.double(), members, counts)  # [B, k], [B, k, D]
    own = (sizes.log()[:, None] + replaced[1]).T  # [B, k], log-weights of the replaced anchors
    pooled = intervene(log_weights, means, own, replaced[0].double())  # [k+1, B, D]
    logits = model.classify(pooled.to(values.dtype))  # [k+1, C]
    factual = logits[-1]
    if type(model).attention is SoftmaxPooling.attention:
        branch = int(factual.argmax()) if len(log_weights) > 1 else 0
        attention = (log_weights[branch].softmax(0) / sizes).cpu().numpy()
    else:
        attention = anchor_means(model.attention(bag), segment, counts)
    return Outcomes(factual, logits[:-1], attention)


def super_instances(values: Tensor, scores: Tensor, members: Tensor, counts: np.ndarray) -> tuple[Tensor, Tensor]:
    """Log-weight [B, k] and mean [B, k, D] of every anchor; values [N, D], scores [N, B] float64, members [N]."""
    n, branches = scores.shape
    top = scores.new_full((len(counts), branches), -torch.inf)
    top.scatter_reduce_(0, members[:, None].expand(n, branches), scores, "amax")
    weights = (scores - top[members]).exp()  # [N, B], largest of each anchor is 1
    total = torch.zeros_like(top).index_add_(0, members, weights)
    share = (weights / total[members]).to(values.dtype)  # sums to 1 over each anchor
    # an embedding bag sums rows of `values` where they lie: far cheaper than a product with a one-hot matrix
    order = members.argsort(stable=True)
    starts = torch.from_numpy(np.cumsum(counts) - counts).to(members.device)
    means = [
        embedding_bag(order, values, starts, mode="sum", per_sample_weights=share[order, branch])
        for branch in range(branches)
    ]
    return (top + total.log()).T, torch.stack(means).double()


def intervene(log_weights: Tensor, means: Tensor, own: Tensor, values: Tensor) -> Tensor:
    """Slide vectors [k+1, B, D] of every intervention, and of the slide itself in the last row."""
    k = log_weights.shape[1]
    table = log_weights[:, None, :].repeat(1, k + 1, 1)  # [B, k+1, k]
    table[:, :k].diagonal(dim1=1, dim2=2).copy_(own)
    weights = table.softmax(-1)
    diagonal = weights[:, :k].diagonal(dim1=1, dim2=2)
    own_weights = diagonal.clone()  # [B, k]
    diagonal.zero_()
    pooled = weights @ means
    pooled[:, :k] += own_weights[..., None] * values
    return pooled.transpose(0, 1)
