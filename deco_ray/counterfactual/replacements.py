"""What an intervention puts in place of an anchor's patches (supplement, counterfactual constructions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from deco_ray.models.protocol import Aggregator, SoftmaxPooling

Construction = Literal["normal", "anchor", "zero"]


def replacements(anchors: Any, construction: Construction = "normal") -> np.ndarray:
    """Rows b_k [K, d] for `deco_ray.anchors.Anchors`: matched normal prototype, the anchor's own, or zero."""
    if construction == "normal":
        return np.asarray(anchors.replacements)
    if construction == "anchor":
        return np.asarray(anchors.anchors)
    return np.zeros_like(np.asarray(anchors.anchors))


@dataclass(frozen=True)
class Replacements:
    """Replacement rows on the judge's device with their instance terms, evaluated once per judge."""

    rows: Tensor  # [K, d]
    values: Tensor | None = None  # [K, D]
    scores: Tensor | None = None  # [K, B]

    @classmethod
    def prepare(cls, model: Aggregator, rows: ArrayLike | Tensor) -> Replacements:
        """Always all K rows at once: their bits then do not depend on which anchors a slide has."""
        like = next(model.parameters())
        rows = torch.as_tensor(rows if isinstance(rows, Tensor) else np.asarray(rows)).to(like)
        if not isinstance(model, SoftmaxPooling):
            return cls(rows.detach())
        training = model.training
        model.eval()
        with torch.no_grad():
            values, scores = model.instance_terms(rows)
        model.train(training)
        return cls(rows.detach(), values, scores)

    def take(self, anchors: np.ndarray) -> Replacements:
        """The rows of the given anchors [k]."""
        if len(anchors) == len(self.rows):
            return self
        index = torch.from_numpy(anchors).to(self.rows.device)
        if self.values is None or self.scores is None:
            return Replacements(self.rows[index])
        return Replacements(self.rows[index], self.values[index], self.scores[index])
