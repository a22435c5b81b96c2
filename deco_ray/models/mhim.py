"""MHIM-MIL (Tang et al., 2023, first version): a student learns from what its teacher's masking leaves."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from deco_ray.models.abmil import ABMIL
from deco_ray.models.mhim_milbaseline import MHIMMilBaseline
from deco_ray.models.protocol import Aggregator, Criterion, Partner, SoftmaxPooling, Visit, check_choice
from deco_ray.models.transmil import TransMIL

TEACHER_TEMPERATURE = 0.1


@dataclass(frozen=True)
class Recipe:
    """Shares of patches masked at random, for low and for high teacher attention, and the teacher's pull."""

    random: float  # ρ
    low: float  # ρ_l
    high: float  # ρ_h, decays to 0 over the training
    high_share: float  # ρ_hr: the highest ρ_h/ρ_hr are candidates, this share of them is masked
    consistency: float  # λ
    momentum: float = 0.9999
    cosine_momentum: bool = False  # the momentum rises to 1 over the training


# the published settings of both datasets; one is taken whole, then changed option by option
RECIPES = {
    ("c16", "abmil"): Recipe(0.5, 0.0, 0.01, 0.5, 0.1),
    ("tcga", "abmil"): Recipe(0.7, 0.2, 0.02, 1.0, 0.5, cosine_momentum=True),
    ("c16", "transmil"): Recipe(0.0, 0.8, 0.03, 0.5, 0.1, cosine_momentum=True),
    ("tcga", "transmil"): Recipe(0.6, 0.2, 0.02, 1.0, 0.5),
}

BASES: dict[str, tuple[type[ABMIL] | type[TransMIL], dict[str, Any]]] = {
    "abmil": (ABMIL, {"activation": "relu", "attention_bias": False, "dropout": 0.25}),
    "transmil": (TransMIL, {"padding": "ppeg", "dropout": 0.25}),
}


class MHIM(Aggregator):
    """The teacher sees the full bag and masks it; the student learns from the rest, and to sum it up alike.

    L = CE(student(masked bag)) + λ·CL, CL = −Σ softmax(f_T/0.1)·log softmax(f_S) over the slide vectors' features.
    The teacher has no gradient, keeps its dropout on in training, and follows the student by moving average.
    The student predicts, from full bags; pseudo-bags are small already and are not masked again.

    A plain base is to be trained first (`pretraining`): all of it starts the teacher, its embedding the student.
    Without it both start from the same random weights, and masking is close to random for the first epochs.
    """

    def __init__(self, dim: int, classes: int, base: str, recipe: Recipe) -> None:
        super().__init__(dim, classes)
        self.base, self.recipe = base, recipe
        model, options = BASES[base]
        self.student = model(dim, classes, **options)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, bag: Tensor) -> Tensor:
        return self.student(bag)

    def attention(self, bag: Tensor) -> Tensor:
        """The student's, since the student predicts."""
        return self.student.attention(bag)

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
        with torch.no_grad():
            target, attention = self.teacher.slide_vector(bag)
            kept = kept_patches(attention, self.recipe, progress)
        feature, _ = self.student.slide_vector(bag[kept])
        consistency = self.recipe.consistency * consistency_loss(target, feature)
        logits = self.student.classifier(feature)
        return Visit(logits, self.sub_bag_logits(bag, sub_bags), extra={"consistency": consistency})

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        momentum = self.recipe.momentum
        if self.recipe.cosine_momentum:
            momentum = 1 - (1 - momentum) * cosine_decay(progress)
        for follower, leader in zip(self.teacher.parameters(), self.student.parameters()):
            follower.lerp_(leader, 1 - momentum)

    def pretraining(self) -> tuple[str, dict[str, Any]]:
        return self.base, dict(BASES[self.base][1])

    def load_pretrained(self, state: dict[str, Tensor]) -> None:
        self.teacher.load_state_dict(state)
        self.student.embed.load_state_dict(self.teacher.embed.state_dict())

    def classifier_parameters(self) -> list[nn.Parameter]:
        return self.student.classifier_parameters()


class SoftmaxMHIM(MHIM, SoftmaxPooling):
    """MHIM-MIL on AB-MIL: what predicts is a softmax pooling, so its shortcuts hold."""

    student: ABMIL

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        return self.student.instance_terms(bag)

    def classify(self, pooled: Tensor) -> Tensor:
        return self.student.classify(pooled)


def mhim(
    dim: int,
    classes: int,
    base: str = "abmil",
    variant: str = "v1",
    recipe: str = "c16",
    mask_random: float | None = None,
    mask_low: float | None = None,
    mask_high: float | None = None,
    high_share: float | None = None,
    consistency: float | None = None,
    momentum: float | None = None,
) -> Aggregator:
    """MHIM-MIL on `base`, by a published `recipe`; the numbers given replace the recipe's.

    `variant="milbaseline"` is the other model that goes by this name; none of the other options apply to it.
    """
    check_choice("variant", variant, ("v1", "milbaseline"))
    if variant == "milbaseline":
        return MHIMMilBaseline(dim, classes)
    check_choice("base", base, tuple(BASES))
    check_choice("recipe", recipe, ("c16", "tcga"))
    changes: dict[str, Any] = {
        "random": mask_random,
        "low": mask_low,
        "high": mask_high,
        "high_share": high_share,
        "consistency": consistency,
        "momentum": momentum,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    kind = SoftmaxMHIM if base == "abmil" else MHIM
    return kind(dim, classes, base, replace(RECIPES[recipe, base], **given))


def kept_patches(attention: Tensor, recipe: Recipe, progress: float) -> Tensor:
    """Indices, ascending, of the patches that random, low and high masking leave; at least one.

    attention [heads, N] of the teacher. The original can keep none of a short bag; then one random patch stays.
    """
    n = attention.shape[1]
    keep = torch.ones(n, dtype=torch.bool, device=attention.device)
    keep[torch.randperm(n, device=attention.device)[: math.ceil(recipe.random * n)]] = False
    keep[extremes(attention, math.ceil(recipe.low * n), largest=False)] = False
    high = recipe.high * cosine_decay(progress)
    candidates = extremes(attention, min(n, math.ceil(high / recipe.high_share * n)), largest=True)
    order = torch.randperm(len(candidates), device=attention.device)
    keep[candidates[order[: math.ceil(recipe.high_share * len(candidates))]]] = False
    if not keep.any():
        keep[torch.randint(n, (1,), device=attention.device)] = True
    return keep.nonzero()[:, 0]


def extremes(attention: Tensor, k: int, largest: bool) -> Tensor:
    """The k patches of highest (lowest) attention [heads, N]; several heads vote, each for its own k."""
    chosen = attention.topk(k, largest=largest).indices  # [heads, k]
    if len(attention) == 1:
        return chosen[0]
    votes = torch.zeros_like(attention).scatter_(1, chosen, 1.0).sum(0)
    return votes.topk(k).indices


def consistency_loss(target: Tensor, feature: Tensor) -> Tensor:
    """CL of the teacher's and the student's slide vectors [D], over their features and not over classes."""
    return -((target / TEACHER_TEMPERATURE).softmax(0) * log_softmax(feature, 0)).sum()


def cosine_decay(progress: float) -> float:
    """From 1 at the start of the training to 0 at its end."""
    return 0.5 * (1 + math.cos(math.pi * progress))
