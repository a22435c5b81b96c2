"""Criteria for long-tailed training, by name, and the post-hoc correction of logits.

All take one slide a step: weights multiply the loss of a slide. (PyTorch's weighted mean divides by the weight
again, so over a single slide its class weights do nothing.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from deco_ray.config import TrainingSection
from deco_ray.models.protocol import Criterion


def make_criterion(section: TrainingSection, train_counts: Sequence[int]) -> Criterion:
    """The training loss (logits [B, C], labels [B]) -> [] that `section.loss` names; picklable."""
    counts = torch.as_tensor(train_counts, dtype=torch.float32).clamp_min(1)  # absent classes are never a label
    if section.loss == "weighted_ce":
        return partial(weighted_ce, weights=counts.sum() / (len(counts) * counts))
    if section.loss == "focal":
        return partial(focal, gamma=section.focal_gamma)
    if section.loss == "ldam":
        return partial(ldam, margins=section.ldam_margin * (counts.min() / counts) ** 0.25)
    if section.loss == "balanced_softmax":
        return partial(balanced_softmax, log_prior=log_prior(train_counts))
    return cross_entropy


def weighted_ce(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy times n/(C n_y): every class weighs alike, a training slide weighs 1 on average."""
    return (weights.to(logits)[labels] * cross_entropy(logits, labels, reduction="none")).mean()


def focal(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """(1 − p_y)^γ times cross-entropy (Lin et al., 2017)."""
    losses = cross_entropy(logits, labels, reduction="none")
    doubt = -torch.expm1(-losses)  # 1 − p_y, exact also when p_y is close to 1
    # the floor keeps the power's slope finite for γ < 1
    return (doubt.clamp_min(1e-8) ** gamma * losses).mean()


def ldam(logits: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
    """Cross-entropy after taking Δ_y ∝ n_y^(−1/4) from the own logit; the rarest class has the full margin.

    Cao et al. (2019) scale cosine logits by 30; aggregators here have linear heads, whose logits are used as they are.
    """
    own = one_hot(labels, logits.shape[1]) * margins.to(logits)
    return cross_entropy(logits - own, labels)


def balanced_softmax(logits: Tensor, labels: Tensor, log_prior: Tensor) -> Tensor:
    """Cross-entropy of logits plus log class frequency (Ren et al., 2020); train-time logit adjustment with τ = 1."""
    return cross_entropy(logits + log_prior.to(logits), labels)


def log_prior(train_counts: Sequence[int]) -> Tensor:
    """log(n_c / n) [C]; a class without training slides counts as one slide."""
    counts = torch.as_tensor(train_counts, dtype=torch.float32).clamp_min(1)
    return (counts / counts.sum()).log()


def adjust_logits(logits: Tensor, log_prior: Tensor, tau: float) -> Tensor:
    """Post-hoc logit adjustment (Menon et al., 2021): logits [..., C] − τ · log prior [C]."""
    return logits - tau * log_prior.to(logits)
