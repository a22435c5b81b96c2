"""AMD-MIL (Ling et al., 2024): TransMIL's skeleton with agent attention whose agents are masked and denoised."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from deco_ray.models.cls_transformer import ClsTransformer


class AgentMaskDenoise(nn.Module):
    """R = softmax_agents(q Gᵀ/8); Z = softmax_L(G kᵀ) v; out = R · softmax_channels(Z ⊙ [σ(M Z) > τ] + σ(D Z)).

    G are learned agents shared by all bags; τ = σ(mean of Lin(Z)). The comparison has no gradient, so the mask
    and threshold layers keep their initial weights for ever: the public code is so, and a straight-through
    estimator would be another method. Quirk: rows for τ are cut from the [head, agent, channel] layout, which
    mixes heads and agents; `agent_rows=True` gives each agent its own row.
    """

    def __init__(self, dim: int, heads: int, agents: int, agent_rows: bool) -> None:
        super().__init__()
        self.heads, self.agent_rows = heads, agent_rows
        head_dim = dim // heads
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.agents = nn.Parameter(torch.randn(heads, agents, head_dim))
        self.mask = nn.Linear(head_dim, head_dim)
        self.denoise = nn.Linear(head_dim, head_dim)
        self.threshold = nn.Linear(dim, 1)

    def forward(self, tokens: Tensor, rows: int | None = None, first_row: bool = False) -> tuple[Tensor, Tensor | None]:
        """Tokens [L, dim] -> outputs of the first `rows` tokens, and row 0 of R S [heads, L] if asked for."""
        dim = tokens.shape[1]
        q = linear(tokens[:rows], self.qkv.weight[:dim]).unflatten(1, (self.heads, -1)).transpose(0, 1)[None]
        k, v = linear(tokens, self.qkv.weight[dim:]).unflatten(1, (2, self.heads, -1)).permute(1, 2, 0, 3)[:, None]
        agents = self.agents[None]  # [1, h, A, d]
        gathered = scaled_dot_product_attention(agents, k, v, scale=1.0)  # unscaled, unlike R
        out = scaled_dot_product_attention(q, agents, self.masked(gathered[0])[None], scale=self.scale)
        heads = out[0].transpose(0, 1).flatten(1)  # [rows, dim]; each head's part of a row sums to 1
        if not first_row:
            return heads, None
        spread = (q[0, :, :1] @ self.agents.mT * self.scale).softmax(-1)  # [h, 1, A]
        return heads, (spread @ (self.agents @ k[0].mT).softmax(-1))[:, 0]

    def masked(self, gathered: Tensor) -> Tensor:  # [h, A, d] -> [h, A, d]
        by_agent = gathered.transpose(0, 1) if self.agent_rows else gathered
        threshold = self.threshold(by_agent.reshape(gathered.shape[1], -1)).mean().sigmoid()
        mask = (self.mask(gathered).sigmoid() > threshold).to(gathered.dtype)
        return (gathered * mask + self.denoise(gathered).sigmoid()).softmax(-1)


class AMDMIL(ClsTransformer):
    """The class-token skeleton with masked, denoised agent attention (no output projection)."""

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int = 512,
        heads: int = 8,
        agents: int = 256,
        dropout: float = 0.25,
        cls_std: float = 1e-6,
        agent_rows: bool = False,
    ) -> None:
        def attention() -> AgentMaskDenoise:
            return AgentMaskDenoise(hidden, heads, agents, agent_rows)

        super().__init__(dim, classes, hidden, dropout, cls_std, "square", attention)
