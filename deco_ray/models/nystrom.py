"""Nyström self-attention (Xiong et al., 2021) as TransMIL uses it: 256 landmarks stand in for all keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

TAPS = 33  # of the value convolution
PINV_ITERATIONS = 6


class NystromAttention(nn.Module):
    """out = Lin(F G⁺ (B v) + conv(v)) with F = softmax(q k̃ᵀ), G = softmax(q̃ k̃ᵀ), B = softmax(q̃ kᵀ).

    q̃, k̃ are means over L′/256 consecutive tokens. To make L′ a multiple of 256, zero rows go to the front
    and are not masked: they take part as keys, and results of short bags depend on them.
    F and B are never whole in memory: cost and memory grow linearly with L.
    """

    def __init__(
        self, dim: int = 512, heads: int = 8, head_dim: int = 64, landmarks: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.heads, self.landmarks, self.scale = heads, landmarks, head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.value_conv = nn.Conv2d(heads, heads, (TAPS, 1), groups=heads, bias=False)
        self.out = nn.Linear(heads * head_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, rows: int | None = None, first_row: bool = False) -> tuple[Tensor, Tensor | None]:
        """Tokens [L, dim] -> outputs of the first `rows` tokens, and row 0 of F G⁺ B [heads, L] if asked for."""
        length = len(tokens)
        rows = rows or length
        front = -length % self.landmarks
        # no bias, so zero rows stay zero through the projection and can be added after it
        projected = pad(self.qkv(tokens), (0, 0, front, 0))  # [L', 3*h*d]
        q, k, v = projected.unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)  # [1, h, L', d]
        q_marks = q.unflatten(2, (self.landmarks, -1)).mean(3) * self.scale  # [1, h, m, d]
        k_marks = k.unflatten(2, (self.landmarks, -1)).mean(3)
        alike = front * self.landmarks // (front + length)  # landmarks of zero rows only
        inverse = pseudo_inverse((q_marks @ k_marks.mT).softmax(-1), alike)  # [1, h, m', m']
        gathered = scaled_dot_product_attention(q_marks, k, v, scale=1.0)  # B v: [1, h, m, d]
        summary = unfold(inverse @ fold(gathered, alike), alike)  # G⁺ B v
        attended = scaled_dot_product_attention(q[:, :, front : front + rows], k_marks, summary, scale=self.scale)
        reach = TAPS // 2
        window = pad(v, (0, 0, reach, reach))[:, :, front : front + rows + 2 * reach]
        heads = attended + self.value_conv(window)  # [1, h, rows, d]
        out = self.dropout(self.out(heads[0].transpose(0, 1).flatten(1)))
        if not first_row:
            return out, None
        weights = (q[0, :, front : front + 1] @ k_marks[0].mT * self.scale).softmax(-1)  # [h, 1, m]
        reach_out = (q_marks[0] @ k[0].mT).softmax(-1)  # B: [h, m, L']
        row = fold(weights.mT, alike).mT @ inverse[0] @ fold(reach_out, alike)
        return out, row[:, 0, front:]


def pseudo_inverse(matrix: Tensor, alike: int = 0) -> Tensor:
    """Iterative Moore-Penrose inverse of [1, h, m, m], folded to m' = m − alike + 1 when `alike` exceeds 1.

    The start is scaled by maxima over all heads together. The first `alike` rows are equal, and columns too
    (landmarks of nothing but zero rows). Every iterate is then constant on them, so one row and column of weight
    √alike stand for all: the same iteration on a smaller matrix, a tenth of the work for a biopsy's few patches.
    """
    start = matrix.abs().sum(-1).max() * matrix.abs().sum(-2).max()
    matrix = fold(fold(matrix, alike).mT, alike).mT
    inverse = matrix.mT / start
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(PINV_ITERATIONS):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return inverse


def fold(rows: Tensor, alike: int) -> Tensor:
    """Project the first `alike` of [..., m, n] on their common direction: [..., m − alike + 1, n]."""
    if alike < 2:
        return rows
    return torch.cat([rows[..., :alike, :].sum(-2, keepdim=True) * alike**-0.5, rows[..., alike:, :]], -2)


def unfold(rows: Tensor, alike: int) -> Tensor:
    """Back from `fold`, for rows that are constant on the first `alike`."""
    if alike < 2:
        return rows
    shared = (rows[..., :1, :] * alike**-0.5).expand(*rows.shape[:-2], alike, -1)
    return torch.cat([shared, rows[..., 1:, :]], -2)
