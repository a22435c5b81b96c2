"""Every intervention of a slide through the judge itself: the generic path, for any aggregator.

Two things are spared without knowing the model. Layers that see the bag row by row run once, since an
intervention changes their output only in the replaced rows. And small bags go through together, in batches
under a memory cap; a model that cannot be batched (`torch.vmap` says so) takes them one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deco_ray.counterfactual.outcomes import Outcomes, anchor_means
from deco_ray.counterfactual.row_layers import first_row_layers, substituted
from deco_ray.models.protocol import Aggregator

CPU_BATCH_BYTES = 2**21  # a forward that allocates this much is arithmetic; a batch of them only leaves the cache


def brute_outcomes(
    model: Aggregator, bag: Tensor, segment: np.ndarray, counts: np.ndarray, rows: Tensor, memory_cap: int
) -> Outcomes:
    """Logits of the slide and of its k interventions; bag [N, d], segment [N] in 0..k-1, rows [k, d], cap in bytes."""
    with Allocations() as allocations:
        layers, factual = first_row_layers(model, bag)
    attention = anchor_means(model.attention(bag), segment, counts)
    before = [bag, *(layer(bag) for layer in layers)]  # [N, ·] each
    after = [rows, *(layer(rows) for layer in layers)]  # [k, ·] each
    each = allocations.bytes + sum(tensor.nbytes for tensor in before)
    batch = batch_size(len(rows), each, memory_cap, bag.is_cuda)
    members = torch.from_numpy(segment).to(bag.device)
    intervened = None
    if batch > 1:
        intervened = in_batches(model, layers, before, after, members, batch)
    if intervened is None:
        intervened = one_by_one(model, layers, before, after, members)
    return Outcomes(factual, intervened, attention)


def batch_size(interventions: int, bytes_each: int, memory_cap: int, cuda: bool) -> int:
    """As many interventions together as the cap allows, at least one."""
    limit = memory_cap if cuda else min(memory_cap, CPU_BATCH_BYTES)
    return max(1, min(interventions, limit // max(bytes_each, 1)))


def one_by_one(
    model: Aggregator, layers: Sequence[nn.Module], before: Sequence[Tensor], after: Sequence[Tensor], members: Tensor
) -> Tensor:
    """Logits [k, C]: one working copy, an anchor's rows swapped in and out again."""
    work = [tensor.clone() for tensor in before]
    order = members.argsort(stable=True)
    groups = order.split(torch.bincount(members).tolist())
    logits = []
    with substituted(layers, work[1:]):
        for anchor, group in enumerate(groups):
            for tensor, rows in zip(work, after):
                tensor[group] = rows[anchor]
            versions = [tensor._version for tensor in work]
            logits.append(model(work[0]))
            for tensor, original, version in zip(work, before, versions):
                if tensor._version == version:
                    tensor[group] = original[group]
                else:  # the model wrote into what it was given (an in-place activation)
                    tensor.copy_(original)
    return torch.stack(logits)


def in_batches(
    model: Aggregator,
    layers: Sequence[nn.Module],
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    members: Tensor,
    batch: int,
) -> Tensor | None:
    """Logits [k, C] from `batch` intervened bags at a time, or none when the model cannot be vectorised."""
    current: list[Tensor] = list(before[1:])

    def forward(bag: Tensor, *outputs: Tensor) -> Tensor:
        current[:] = outputs
        return model(bag)

    logits = []
    with substituted(layers, current), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # operators without a batching rule are looped over: still right
        for anchors in torch.arange(len(after[0]), device=members.device).split(batch):
            chosen = (members == anchors[:, None])[..., None]  # [b, N, 1]
            bags = [torch.where(chosen, rows[anchors][:, None], whole) for rows, whole in zip(after, before)]
            try:
                logits.append(torch.vmap(forward)(*bags))
            except (RuntimeError, ValueError):  # control flow on data, dynamic shapes
                return None
    return torch.cat(logits)


class Allocations(TorchDispatchMode):
    """Counts the bytes that a forward pass allocates: no less than what it holds at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and not function.is_view:
                self.bytes += tensor.nbytes
        return result
