"""ILRA-MIL (Xiang et al., 2023): attention through a few latent vectors, applied twice, then pooling by one seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deco_ray.models.initialisation import xavier_normal
from deco_ray.models.protocol import Aggregator


class LatentAttention(nn.Module):
    """MHA(Q, K): O = q + Attention(q, k, v); O += ReLU(Lin(O)); gated: O ⊙ SiLU(Lin(Q)).

    Projected twice (here and inside the attention) and residual on the projected q, as in the original code.
    """

    def __init__(self, dim_q: int, dim_k: int, width: int, heads: int, gated: bool, norm: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim_q, width), nn.Linear(dim_k, width), nn.Linear(dim_k, width)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mix = nn.Linear(width, width)
        self.norm_attended: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.norm_mixed: nn.Module = nn.LayerNorm(width) if norm else nn.Identity()
        self.gate = nn.Linear(dim_q, width) if gated else None

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:  # [Lq, dim_q], [Lk, dim_k] -> [Lq, width]
        q = self.q(queries)
        # explicit weights: with one key their gradient is exactly zero, in a fused kernel only nearly
        attended, _ = self.attend(q, self.k(keys), self.v(keys), average_attn_weights=False)
        out = self.norm_attended(q + attended)
        out = self.norm_mixed(out + functional.relu(self.mix(out)))
        return out if self.gate is None else out * functional.silu(self.gate(queries))

    def weights(self, queries: Tensor, keys: Tensor) -> Tensor:  # -> [Lq, Lk], mean over heads
        return self.attend(self.q(queries), self.k(keys), self.v(keys))[1]


class ILRA(Aggregator):
    """Twice: H = MHA(L, X) with `rank` learnable latents L, X ← MHA(X, H); then z = MHA(seed, X), logits = Lin(z).

    `rank` 1 and `norm` are the published configuration; at rank 1 every patch receives the same context.
    There is no dropout. One seed pools whatever the rank (as the official code, not MIL_BASELINE).
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        rank: int = 1,
        norm: bool = True,
        width: int = 256,
        heads: int = 8,
        layers: int = 2,
    ) -> None:
        super().__init__(dim, classes)
        self.latents = nn.ParameterList()
        self.gather, self.spread = nn.ModuleList(), nn.ModuleList()
        for layer in range(layers):
            dim_in = width if layer else dim
            self.latents.append(nn.init.xavier_uniform_(nn.Parameter(torch.empty(rank, width))))
            self.gather.append(LatentAttention(width, dim_in, width, heads, True, norm))
            self.spread.append(LatentAttention(dim_in, width, width, heads, True, norm))
        self.seed = nn.init.xavier_uniform_(nn.Parameter(torch.empty(1, width)))
        self.pool = LatentAttention(width, width, width, heads, False, norm)
        self.classifier = nn.Linear(width, classes)
        xavier_normal(self)

    def context(self, bag: Tensor) -> Tensor:  # [N, d] -> [N, width]
        for latent, gather, spread in zip(self.latents, self.gather, self.spread):
            bag = spread(bag, gather(latent, bag))
        return bag

    def forward(self, bag: Tensor) -> Tensor:
        return self.classifier(self.pool(self.seed, self.context(bag))[0])

    def attention(self, bag: Tensor) -> Tensor:
        """Head-averaged weights of the pooling seed; sums to 1."""
        return self.pool.weights(self.seed, self.context(bag))[0]

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
