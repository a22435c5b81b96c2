"""The skeleton TransMIL and AMD-MIL share: a class token, two attention layers, a position encoding between."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deco_ray.models.initialisation import xavier_normal
from deco_ray.models.ppeg import PPEG, pad_to_square
from deco_ray.models.protocol import Aggregator, check_choice


class ClsTransformer(Aggregator):
    """Embed, pad to a square, prepend CLS; T += A(LN T); PPEG on patches; T += A(LN T); logits = Lin(LN(T)[0]).

    An attention layer A maps tokens [L, D] to (outputs of the first `rows` tokens, its CLS row [heads, L]).
    The last layer computes the CLS row alone: nothing else reaches the logits. No feed-forward sublayers.
    `padding="ppeg"` squares the tokens inside PPEG only, to at least 7×7 (MHIM-MIL's reading of TransMIL).
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int,
        dropout: float,
        cls_std: float,
        padding: str,
        attention: Callable[[], nn.Module],
    ) -> None:
        super().__init__(dim, classes)
        check_choice("padding", padding, ("square", "ppeg"))
        self.padding = padding
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.cls = nn.Parameter(cls_std * torch.randn(1, hidden))
        self.first_norm, self.first_layer = nn.LayerNorm(hidden), attention()
        self.ppeg = PPEG(hidden, least_side=7 if padding == "ppeg" else 1)
        self.last_norm, self.last_layer = nn.LayerNorm(hidden), attention()
        self.norm = nn.LayerNorm(hidden)
        self.classifier = nn.Linear(hidden, classes)
        xavier_normal(self)

    def tokens(self, bag: Tensor, first_row: bool = False) -> tuple[Tensor, Tensor | None]:
        """Tokens [L, D] that enter the last layer, and the first layer's CLS row [heads, L] if asked for."""
        patches = self.embed(bag)
        if self.padding == "square":
            patches = pad_to_square(patches)
        tokens = torch.cat([self.cls, patches])
        change, row = self.first_layer(self.first_norm(tokens), first_row=first_row)
        tokens = tokens + change
        return torch.cat([tokens[:1], self.ppeg(tokens[1:])]), row

    def summarise(self, tokens: Tensor) -> Tensor:  # [L, D] -> [D]
        change, _ = self.last_layer(self.last_norm(tokens), rows=1)
        return self.norm(tokens[0] + change[0])

    def forward(self, bag: Tensor) -> Tensor:
        return self.classifier(self.summarise(self.tokens(bag)[0]))

    def attention(self, bag: Tensor) -> Tensor:
        """The last layer's CLS row on the N patches, mean over heads; the rest lies on CLS and padding."""
        _, row = self.last_layer(self.last_norm(self.tokens(bag)[0]), rows=1, first_row=True)
        return row.mean(0)[1 : len(bag) + 1]

    def slide_vector(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        """The final CLS token [D], what the classifier sees, and the first layer's CLS rows [heads, N]."""
        tokens, row = self.tokens(bag, first_row=True)
        assert row is not None
        return self.summarise(tokens), row[:, 1 : len(bag) + 1]

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
