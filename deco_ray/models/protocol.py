"""What every aggregator promises: logits for a bag, a score per patch, and the losses of one training visit.

Two kinds exist. `Aggregator` is any module. `SoftmaxPooling` pools by a softmax-weighted sum of per-instance
terms; its per-instance stage then serves many sub-bags in one pass and exact counterfactuals in one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deco_ray.errors import ModelError

Criterion = Callable[[Tensor, Tensor], Tensor]  # (logits [B, C], labels [B]) -> scalar


@dataclass
class Visit:
    """What a model makes of one training visit: logits with gradient, and named extra losses already weighted."""

    logits: Tensor  # [C], of the main bag
    sub_logits: Tensor  # [S, C], of the pseudo-bags
    main_weight: float = 1.0  # CLAM and DS-MIL share the supervision with a second loss
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Partner:
    """A second slide, drawn class-balanced, for methods that learn from two distributions at once."""

    bag: Tensor  # [N', d]
    label: Tensor  # []


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse an option's value that is not among the known ones."""
    if value not in choices:
        raise ModelError(f"model option {option} = {value!r}: choose one of {', '.join(choices)}")


def parameter_count(model: nn.Module) -> int:
    """How many numbers training moves; a teacher that follows by moving average is not counted."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


class Aggregator(nn.Module):
    needs_partner: ClassVar[bool] = False  # the loop passes a class-balanced second slide to `visit`
    needs_centres: ClassVar[int] = 0  # so many K-means centres of training patches go to `set_centres` first

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.dim, self.classes = dim, classes

    def forward(self, bag: Tensor) -> Tensor:  # [N, d] -> [C]
        raise NotImplementedError(f"{type(self).__name__}.forward")

    def attention(self, bag: Tensor) -> Tensor:  # [N, d] -> [N]
        """How much each patch weighs in the prediction; the meaning is the method's own."""
        raise NotImplementedError(f"{type(self).__name__}.attention")

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
        """One training visit: the main bag [N, d], its label [], pseudo-bags as indices into it.

        `progress` runs from 0 to 1 over the training, for schedules inside a method.
        """
        return Visit(self(bag), self.sub_bag_logits(bag, sub_bags))

    def sub_bag_logits(self, bag: Tensor, sub_bags: Sequence[Tensor]) -> Tensor:  # -> [S, C]
        if not sub_bags:
            return bag.new_zeros((0, self.classes))
        return torch.stack([self(bag[members]) for members in sub_bags])

    def after_step(self, progress: float) -> None:
        """Called after every optimiser step (teachers follow here)."""

    def pretraining(self) -> tuple[str, dict[str, Any]] | None:
        """Name and options of the model to train plainly first; its state goes to `load_pretrained`."""
        return None

    def load_pretrained(self, state: dict[str, Tensor]) -> None:
        raise NotImplementedError(f"{type(self).__name__} takes no pretrained state")

    def set_centres(self, centres: Tensor) -> None:  # [needs_centres, d]
        raise NotImplementedError(f"{type(self).__name__} takes no centres")

    def classifier_parameters(self) -> list[nn.Parameter]:
        """The last layer, which classifier retraining (cRT) trains alone."""
        raise NotImplementedError(f"{type(self).__name__}.classifier_parameters")


class SoftmaxPooling(Aggregator):
    """Slide vector of branch b = Σ_n softmax_n(score_nb) value_n; one branch, or one per class."""

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:  # [N, d] -> values [N, D], scores [N, B]
        raise NotImplementedError(f"{type(self).__name__}.instance_terms")

    def classify(self, pooled: Tensor) -> Tensor:  # [..., B, D] -> [..., C]
        raise NotImplementedError(f"{type(self).__name__}.classify")

    def forward(self, bag: Tensor) -> Tensor:
        values, scores = self.instance_terms(bag)
        return self.classify(scores.softmax(0).T @ values)

    def attention(self, bag: Tensor) -> Tensor:
        _, scores = self.instance_terms(bag)
        if scores.shape[1] == 1:
            return scores[:, 0].softmax(0)
        return scores[:, self(bag).argmax()].softmax(0)  # the predicted class's branch

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
        values, scores = self.instance_terms(bag)
        whole, parts = self.pool_many(values, scores, sub_bags).split([1, len(sub_bags)])
        return Visit(whole.squeeze(0), parts)

    def sub_bag_logits(self, bag: Tensor, sub_bags: Sequence[Tensor]) -> Tensor:
        if not sub_bags:
            return bag.new_zeros((0, self.classes))
        values, scores = self.instance_terms(bag)
        return self.pool_many(values, scores, sub_bags)[1:]

    def pool_many(self, values: Tensor, scores: Tensor, sub_bags: Sequence[Tensor]) -> Tensor:
        """Logits [1+S, C] of the whole bag and of its sub-bags from one instance pass (ENGINEERING 3.5)."""
        absent = scores.new_full((1 + len(sub_bags), len(values)), -torch.inf)
        absent[0] = 0.0
        for row, members in enumerate(sub_bags, start=1):
            absent[row].index_fill_(0, members, 0.0)
        weights = (scores.T + absent[:, None]).softmax(-1)  # [1+S, B, N]
        return self.classify(weights @ values)
