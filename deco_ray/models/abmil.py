"""AB-MIL (Ilse et al., 2018): attention-based pooling, plain tanh by default, gated on request."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deco_ray.models.initialisation import xavier_normal
from deco_ray.models.protocol import SoftmaxPooling, check_choice


class ABMIL(SoftmaxPooling):
    """H = ReLU(Lin(X)); e = w·tanh(V H), gated: w·(tanh(V H) ⊙ σ(U H)); z = Σ softmax(e) H; logits = Lin(z).

    Plain is what the paper's likely source calls AB-MIL. Dropout acts on H and is off by default; when on,
    the pseudo-bags of a visit share the mask of their reduced bag, since all come from one instance pass.
    `activation="relu"` without `attention_bias` is the AB-MIL that MHIM-MIL builds on.
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        gated: bool = False,
        hidden: int = 512,
        attention_dim: int = 128,
        dropout: float = 0.0,
        activation: str = "tanh",
        attention_bias: bool = True,
    ) -> None:
        super().__init__(dim, classes)
        check_choice("activation", activation, ("tanh", "relu"))
        self.activation: nn.Module = nn.Tanh() if activation == "tanh" else nn.ReLU()
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.tanh_branch = nn.Linear(hidden, attention_dim, bias=attention_bias)
        self.gate_branch = nn.Linear(hidden, attention_dim, bias=attention_bias) if gated else None
        self.score = nn.Linear(attention_dim, 1, bias=attention_bias)
        self.classifier = nn.Linear(hidden, classes)
        xavier_normal(self)

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        values = self.embed(bag)  # [N, D]
        hidden = self.activation(self.tanh_branch(values))
        if self.gate_branch is not None:
            hidden = hidden * torch.sigmoid(self.gate_branch(values))
        return values, self.score(hidden)  # [N, D], [N, 1]

    def classify(self, pooled: Tensor) -> Tensor:  # [..., 1, D] -> [..., C]
        return self.classifier(pooled.squeeze(-2))

    def slide_vector(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        """z [D], what the classifier sees, and the attention [1, N] behind it."""
        values, scores = self.instance_terms(bag)
        attention = scores.softmax(0).T
        return (attention @ values)[0], attention

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
