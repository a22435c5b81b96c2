"""AB-MIL (Ilse et al., 2018): attention-based pooling, plain tanh by default, gated on request."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deco_ray.models.protocol import SoftmaxPooling


class ABMIL(SoftmaxPooling):
    """H = ReLU(Lin(X)); e = w·tanh(V H), gated: w·(tanh(V H) ⊙ σ(U H)); z = Σ softmax(e) H; logits = Lin(z).

    Plain is what the paper's likely source calls AB-MIL. Dropout acts on H and is off by default; when on,
    the pseudo-bags of a visit share the mask of their reduced bag, since all come from one instance pass.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        gated: bool = False,
        hidden: int = 512,
        attention_dim: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, classes)
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.tanh_branch = nn.Linear(hidden, attention_dim)
        self.gate_branch = nn.Linear(hidden, attention_dim) if gated else None
        self.score = nn.Linear(attention_dim, 1)
        self.classifier = nn.Linear(hidden, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        values = self.embed(bag)  # [N, D]
        hidden = torch.tanh(self.tanh_branch(values))
        if self.gate_branch is not None:
            hidden = hidden * torch.sigmoid(self.gate_branch(values))
        return values, self.score(hidden)  # [N, D], [N, 1]

    def classify(self, pooled: Tensor) -> Tensor:  # [..., 1, D] -> [..., C]
        return self.classifier(pooled.squeeze(-2))

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
