"""MDE-MIL (Ling et al., 2025), our reading: two experts over one aggregator, natural and re-balanced; optional text.

No code of it is public. The abstract gives the shared aggregator, the expert decoders, their consistency and the
distillation from text; gated AB-MIL, linear experts, the weights and the text branch's form are our choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from deco_ray.errors import ModelError
from deco_ray.models.abmil import ABMIL
from deco_ray.models.initialisation import xavier_normal
from deco_ray.models.protocol import Criterion, Partner, Visit

TEXT_TEMPERATURE = 0.07


class MDE(ABMIL):
    """Expert u learns the visited slide, expert b a class-balanced partner; the prediction is the mean of both.

    L = CE_u + CE_b + `consistency`·Σ MSE(expert u, expert b) + L_text. `classifier` is expert u.
    `text_embeddings` names a .npy or .csv of class text embeddings [C, d] from the features' own encoder:
    frozen, plus a learned offset in place of learned prompts, they classify the projected slide vector
    (cosine / 0.07, weight 1). The text branch is not used in prediction.
    """

    needs_partner: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        classes: int,
        hidden: int = 512,
        attention_dim: int = 128,
        dropout: float = 0.0,
        consistency: float = 0.25,
        text_embeddings: str | None = None,
    ) -> None:
        super().__init__(dim, classes, True, hidden, attention_dim, dropout)
        self.consistency = consistency
        self.balanced_expert = nn.Linear(hidden, classes)
        xavier_normal(self.balanced_expert)
        self.text = TextBranch(hidden, dim, classes, text_embeddings) if text_embeddings else None

    def classify(self, pooled: Tensor) -> Tensor:  # [..., 1, D] -> [..., C]
        slide = pooled.squeeze(-2)
        return 0.5 * (self.classifier(slide) + self.balanced_expert(slide))

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
        """Logits of expert u; the pseudo-bags' are the prediction's, the mean of both experts."""
        if partner is None:
            raise ModelError("MDE-MIL trains on pairs of slides: its visit needs a class-balanced partner")
        values, scores = self.instance_terms(bag)
        sub_logits = self.pool_many(values, scores, sub_bags)[1:]
        slides = torch.cat([scores.softmax(0).T @ values, self.slide_vector(partner.bag)[0][None]])  # [2, D]
        natural, balanced = self.classifier(slides), self.balanced_expert(slides)  # [2, C] each
        extra = {
            # the partner is drawn class-balanced: a re-balancing criterion would balance it twice
            "balanced": cross_entropy(balanced[1], partner.label),
            "consistency": self.consistency * (mse_loss(natural[0], balanced[0]) + mse_loss(balanced[1], natural[1])),
        }
        if self.text is not None:
            extra["text"] = self.text(slides, torch.stack([label, partner.label]))
        return Visit(natural[0], sub_logits, extra=extra)

    def classifier_parameters(self) -> list[nn.Parameter]:
        return [*self.classifier.parameters(), *self.balanced_expert.parameters()]


class TextBranch(nn.Module):
    """Cross-entropy of cos(Lin(z), t_c)/0.07, t_c = a class's frozen text embedding plus a learned offset.

    The embeddings are part of the state dict: a trained model loads and predicts where the file is not.
    """

    embeddings: Tensor

    def __init__(self, hidden: int, dim: int, classes: int, path: str) -> None:
        super().__init__()
        self.path = path
        self.project = nn.Linear(hidden, dim)
        self.offset = nn.Parameter(torch.zeros(classes, dim))
        self.register_buffer("embeddings", torch.zeros(classes, dim))
        if Path(path).exists():
            self.embeddings.copy_(read_text_embeddings(path, classes, dim))

    def forward(self, slides: Tensor, labels: Tensor) -> Tensor:  # [B, D], [B] -> []
        if not self.embeddings.any():
            raise ModelError(f"no class text embeddings at {self.path}: write them there or drop text_embeddings")
        texts = normalize(self.embeddings + self.offset, dim=-1)
        cosines = normalize(self.project(slides), dim=-1) @ texts.T
        return cross_entropy(cosines / TEXT_TEMPERATURE, labels)


def read_text_embeddings(path: str, classes: int, dim: int) -> Tensor:
    """Unit rows [C, d] from a .npy or a .csv (numbers only, one row per class in the cohort's order)."""
    try:
        table = np.loadtxt(path, delimiter=",", ndmin=2) if path.endswith(".csv") else np.load(path, allow_pickle=False)
        table = np.asarray(table, dtype=np.float32)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise ModelError(
            f"{path} cannot be read as class text embeddings (.npy or .csv of numbers): {error}"
        ) from error
    if table.shape != (classes, dim):
        raise ModelError(f"{path} holds {table.shape}, but {classes} classes of {dim} features need {(classes, dim)}")
    if not np.isfinite(table).all() or (np.linalg.norm(table, axis=1) == 0).any():
        raise ModelError(f"{path} holds values that are not finite, or a class whose embedding is zero")
    return normalize(torch.from_numpy(table), dim=-1)
