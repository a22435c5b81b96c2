"""WiKG (Li et al., 2024): every patch learns from its six most similar patches, then attention or mean pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from deco_ray.models.protocol import Aggregator, check_choice

ROWS = 1024  # patches whose similarities, or whose neighbours' messages, are in memory at once


class Recomputed(torch.autograd.Function):
    """function(e, t, nearest) whose inner tensors [n, k, D], the largest by far, are made again for the gradient.

    What torch.utils.checkpoint does, without the seconds its first call takes to import a compiler.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], e: Tensor, t: Tensor, nearest: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(e, t, nearest)
        return function(e, t, nearest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor, None]:
        e, t, nearest = ctx.saved_tensors
        with torch.enable_grad():
            e, t = e.detach().requires_grad_(), t.detach().requires_grad_()
            grad_e, grad_t = torch.autograd.grad(ctx.function(e, t, nearest), (e, t), gradient)
        return None, grad_e, grad_t, None


class WiKG(Aggregator):
    """H ← ½(H + mean H); e, t = Lin(H), Lin′(H); neighbours = top-k of e tᵀ (self allowed, k at most N).

    Edge r = p t + (1−p) e with p = softmax_k(e·t/√D); score u from t and tanh(e + r); ē = Σ softmax_k(u) t;
    h = LeakyReLU(Lin(e + ē)) + LeakyReLU(Lin(e ⊙ ē)); pool, LN, Lin.

    Quirk: the public code's u is (Σ t)·(Σ tanh), a product of two sums; `score="dot"` is the dot product it
    means. Three linear layers of the public code are never used; they are kept because its size counts them.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int = 512,
        neighbours: int = 6,
        dropout: float = 0.1,
        pool: str = "attention",
        score: str = "sums",
    ) -> None:
        super().__init__(dim, classes)
        check_choice("pool", pool, ("attention", "mean"))
        check_choice("score", score, ("sums", "dot"))
        self.neighbours, self.score = neighbours, score
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU())
        self.head, self.tail = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.unused_gates = nn.ModuleList(
            [nn.Linear(hidden, hidden // 2), nn.Linear(hidden, hidden // 2), nn.Linear(hidden // 2, hidden)]
        )
        self.sum_update, self.product_update = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.gate = (
            nn.Sequential(nn.Linear(hidden, hidden // 2), nn.LeakyReLU(), nn.Linear(hidden // 2, 1))
            if pool == "attention"
            else None
        )
        self.norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, classes)

    def updated(self, bag: Tensor) -> Tensor:  # [N, d] -> [N, D]
        values = self.embed(bag)
        values = 0.5 * (values + values.mean(0))
        e, t = self.head(values), self.tail(values)
        nearest = self.nearest(e.detach(), t.detach())
        if len(e) <= ROWS:
            context = self.context(e, t, nearest)
        else:
            parts = zip(e.split(ROWS), nearest.split(ROWS))
            context = torch.cat([Recomputed.apply(self.context, rows, t, chosen) for rows, chosen in parts])
        update = leaky_relu(self.sum_update(e + context)) + leaky_relu(self.product_update(e * context))
        return self.dropout(update)

    def nearest(self, e: Tensor, t: Tensor) -> Tensor:
        """Indices [N, k] of each row's most similar tails; the N×N similarity exists a slice at a time."""
        k = min(self.neighbours, len(t))
        return torch.cat([(rows @ t.T).topk(k).indices for rows in e.split(ROWS)])

    def context(self, e: Tensor, t: Tensor, nearest: Tensor) -> Tensor:
        """ē [n, D] of rows e [n, D]; the similarities of the chosen neighbours are taken again, with gradient."""
        b = t.index_select(0, nearest.flatten()).unflatten(0, nearest.shape)  # [n, k, D]
        p = ((b @ e[:, :, None]) * e.shape[1] ** -0.5).softmax(1)  # [n, k, 1]
        edge = p * b + (1 - p) * e[:, None]
        gate = torch.tanh(e[:, None] + edge)
        u = b.sum(-1) * gate.sum(-1) if self.score == "sums" else (b * gate).sum(-1)  # [n, k]
        return (u.softmax(1)[:, None] @ b)[:, 0]

    def weights(self, values: Tensor) -> Tensor:  # [N, D] -> [N]
        if self.gate is None:
            return values.new_full((len(values),), 1 / len(values))
        return self.gate(values)[:, 0].softmax(0)

    def forward(self, bag: Tensor) -> Tensor:
        values = self.updated(bag)
        return self.classifier(self.norm(self.weights(values) @ values))

    def attention(self, bag: Tensor) -> Tensor:
        """The readout's softmax gate; uniform with mean pooling."""
        return self.weights(self.updated(bag))

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
