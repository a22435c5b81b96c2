"""CLAM-SB and CLAM-MB (Lu et al., 2021): gated attention plus instance classifiers taught by its extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from deco_ray.models.protocol import Criterion, Partner, SoftmaxPooling, Visit, check_choice

BAG_WEIGHT = 0.7  # the instance loss has the rest


class CLAM(SoftmaxPooling):
    """H = ReLU(Lin(X)); e = W·(tanh(V H) ⊙ σ(U H)), one column (SB) or one per class (MB); logits from Σ softmax(e) H.

    Training adds 0.3 × the instance loss of the main bag: the k most and least attended patches of the true
    class are its positives and negatives; with `subtyping` the most attended are negatives for other classes.
    k is at most N; below 2k patches the two ends overlap and a patch gets both labels, as in the original.

    Quirk: in the original any dropout switches the two gate branches to 0.25 whatever its value; that is
    `gate_dropout=None`. Give a number to set it.
    """

    branch_per_class: ClassVar[bool]

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int = 512,
        attention_dim: int = 256,
        dropout: float = 0.1,
        gate_dropout: float | None = None,
        k: int = 8,
        subtyping: bool = True,
        instance_loss: str = "ce",
    ) -> None:
        super().__init__(dim, classes)
        check_choice("instance_loss", instance_loss, ("ce", "svm"))
        if gate_dropout is None:
            gate_dropout = 0.25 if dropout else 0.0
        self.k, self.subtyping = k, subtyping
        self.instance_criterion = functional.cross_entropy if instance_loss == "ce" else smooth_svm
        self.embed = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.tanh_branch = nn.Sequential(nn.Linear(hidden, attention_dim), nn.Tanh(), nn.Dropout(gate_dropout))
        self.gate_branch = nn.Sequential(nn.Linear(hidden, attention_dim), nn.Sigmoid(), nn.Dropout(gate_dropout))
        self.score = nn.Linear(attention_dim, classes if self.branch_per_class else 1)
        self.classifier = nn.Linear(hidden, classes)
        self.instance_classifiers = nn.ModuleList(nn.Linear(hidden, 2) for _ in range(classes))

    def instance_terms(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        values = self.embed(bag)  # [N, D]
        return values, self.score(self.tanh_branch(values) * self.gate_branch(values))  # [N, D], [N, B]

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
        logits = self.pool_many(values, scores, sub_bags)
        instance = (1 - BAG_WEIGHT) * self.instance_loss(values, scores, int(label))
        return Visit(logits[0], logits[1:], BAG_WEIGHT, {"instance": instance})

    def instance_loss(self, values: Tensor, scores: Tensor, label: int) -> Tensor:
        """Loss of the instance classifiers on H [N, D]; the scores [N, B] choose patches but get no gradient."""
        k = min(self.k, len(values))
        total = values.new_zeros(())
        for c, classifier in enumerate(self.instance_classifiers):
            if c != label and not self.subtyping:
                continue
            branch = scores[:, c if self.branch_per_class else 0].detach()
            chosen = branch.topk(k).indices
            targets = chosen.new_full((k,), int(c == label))
            if c == label:
                chosen = torch.cat([chosen, branch.topk(k, largest=False).indices])
                targets = torch.cat([targets, targets.new_zeros(k)])
            total = total + self.instance_criterion(classifier(values[chosen]), targets)
        return total / self.classes if self.subtyping else total

    def classifier_parameters(self) -> list[nn.Parameter]:
        return list(self.classifier.parameters())


class CLAMSB(CLAM):
    """One attention branch shared by all classes."""

    branch_per_class = False

    def classify(self, pooled: Tensor) -> Tensor:  # [..., 1, D] -> [..., C]
        return self.classifier(pooled.squeeze(-2))


class CLAMMB(CLAM):
    """One attention branch and one scalar classifier per class: logit_c = u_c·z_c + b_c (rows of `classifier`)."""

    branch_per_class = True

    def classify(self, pooled: Tensor) -> Tensor:  # [..., C, D] -> [..., C]
        return (pooled * self.classifier.weight).sum(-1) + self.classifier.bias


def smooth_svm(scores: Tensor, targets: Tensor) -> Tensor:
    """Smooth top-1 SVM of the CLAM commands: log Σ_j exp(s_j + 1[j≠y] − s_y), hard where two scores part widely.

    scores [R, 2], targets [R]. Where the gap reaches ln 1000 the maximum replaces the log-sum-exp.
    """
    own = scores.gather(1, targets[:, None])
    margins = scores + 1 - functional.one_hot(targets, scores.shape[1]) - own  # [R, 2]
    gap = scores.max(1).values - scores.min(1).values
    losses = torch.where(gap >= math.log(1000), margins.max(1).values, margins.logsumexp(1))
    return losses.mean()
