"""What MIL_BASELINE calls MHIM-MIL: one self-attention layer, without teacher, masking or hardness."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deco_ray.models.initialisation import xavier_normal
from deco_ray.models.protocol import Aggregator


class MHIMMilBaseline(Aggregator):
    """H = Dropout(ReLU(Lin(X))); T = LN([CLS; H]); logits = Lin(Attention(T)[0]), 8 heads, no residual.

    Only the CLS query reaches the logits, so only it is computed: linear in N where the original is quadratic.
    """

    def __init__(self, dim: int, classes: int, hidden: int = 512, heads: int = 8, dropout: float = 0.25) -> None:
        super().__init__(dim, classes)
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.cls = nn.Parameter(1e-6 * torch.randn(1, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.attend = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.classifier = nn.Linear(hidden, classes)
        xavier_normal(self)

    def forward(self, bag: Tensor) -> Tensor:
        tokens = self.norm(torch.cat([self.cls, self.embed(bag)]))
        return self.classifier(self.attend(tokens[:1], tokens, tokens, need_weights=False)[0][0])

    def attention(self, bag: Tensor) -> Tensor:
        """Head-averaged CLS attention on the N patches; what is missing to 1 lies on CLS itself."""
        tokens = self.norm(torch.cat([self.cls, self.embed(bag)]))
        return self.attend(tokens[:1], tokens, tokens)[1][0, 1:]

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
