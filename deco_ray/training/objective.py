"""The loss of one visit: main bag, pseudo-bags, their consistency, and what a method adds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deco_ray.models.protocol import Criterion, Visit


def visit_loss(visit: Visit, label: Tensor, criterion: Criterion, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Total loss with gradient, and its named terms without (Eq. 13): main + pseudo + β·consistency + extras.

    Terms are logged unweighted except a method's own extras, which arrive weighted.
    """
    main = criterion(visit.logits[None], label[None])
    total = main if visit.main_weight == 1.0 else visit.main_weight * main
    terms = {"main": main.detach()}
    m = len(visit.sub_logits)
    if m:
        pseudo = criterion(visit.sub_logits, label.expand(m))  # mean over the pseudo-bags
        total = total + pseudo
        terms["pseudo"] = pseudo.detach()
    if m > 1:  # a single pseudo-bag always agrees with itself
        consistency = consistency_loss(visit.sub_logits)
        total = torch.add(total, consistency, alpha=beta)
        terms["consistency"] = consistency.detach()
    for name, extra in visit.extra.items():
        total = total + extra
        terms[name] = extra.detach()
    return total, terms


def consistency_loss(logits: Tensor) -> Tensor:
    """Mean over m of KL(p^(m) ‖ p̄) for logits [m, C] (Eq. 14), in log space so that no probability is divided by."""
    log_p = logits.log_softmax(-1)
    log_mean = log_p.logsumexp(0) - math.log(len(logits))
    return (log_p.exp() * (log_p - log_mean)).sum() / len(logits)
