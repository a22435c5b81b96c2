"""The floor of every comparison: mean and max pooling of embedded patches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deco_ray.models.initialisation import xavier_normal
from deco_ray.models.protocol import Aggregator, Criterion, Partner, SoftmaxPooling, Visit


class MeanPool(SoftmaxPooling):
    """H = ReLU(Lin(X)); logits = Lin(mean H): softmax pooling whose scores are all zero."""

    def __init__(self, dim: int, classes: int, hidden: int = 512, dropout: float = 0.0) -> None:
        super().__init__(dim, classes)
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.classifier = nn.Linear(hidden, classes)
        xavier_normal(self)

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        values = self.embed(bag)
        return values, values.new_zeros((len(bag), 1))

    def classify(self, pooled: Tensor) -> Tensor:  # [..., 1, D] -> [..., C]
        return self.classifier(pooled.squeeze(-2))

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())


class MaxPool(Aggregator):
    """H = ReLU(Lin(X)); logits = Lin(max_N H), the maximum taken feature by feature."""

    def __init__(self, dim: int, classes: int, hidden: int = 512, dropout: float = 0.0) -> None:
        super().__init__(dim, classes)
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.classifier = nn.Linear(hidden, classes)
        xavier_normal(self)

    def forward(self, bag: Tensor) -> Tensor:
        return self.classifier(self.embed(bag).amax(0))

    def attention(self, bag: Tensor) -> Tensor:
        """The share of features whose maximum a patch holds; sums to 1."""
        winners = self.embed(bag).argmax(0)  # [D]
        return torch.bincount(winners, minlength=len(bag)).to(bag.dtype) / len(winners)

    def visit(
        self,
        bag: Tensor,
        label: Tensor,
        sub_bags: Sequence[Tensor] = (),
        *,
        criterion: Criterion,
        partner: Partner | None = None,
        progress: float = 0.0,
    ) -> Visit:
        values = self.embed(bag)
        pooled = torch.stack([values.amax(0), *(values[members].amax(0) for members in sub_bags)])
        logits = self.classifier(pooled)
        return Visit(logits[0], logits[1:])

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())
