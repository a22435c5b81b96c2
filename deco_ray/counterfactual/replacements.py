"""What an intervention puts in place of an anchor's patches (supplement, counterfactual constructions)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    """Replacement rows on the judge's device, with their instance terms evaluated once per judge."""

    rows: Tensor  # [K, d]
    terms: tuple[Tensor, Tensor] | None = None  # values [K, D], scores [K, B] of a softmax-pooling judge

    @classmethod
    def prepare(cls, model: Aggregator, rows: ArrayLike | Tensor) -> Replacements:
        """Always all K rows at once: their bits then do not depend on which anchors a slide has."""
        like = next(model.parameters())
        rows = (rows if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows))).to(like)
        if not isinstance(model, SoftmaxPooling):
            return cls(rows)
        with frozen(model):
            return cls(rows, model.instance_terms(rows))

    def take(self, anchors: np.ndarray) -> Replacements:
        """The rows of the given anchors [k]."""
        if len(anchors) == len(self.rows):
            return self
        index = torch.from_numpy(anchors).to(self.rows.device)
        terms = None if self.terms is None else (self.terms[0][index], self.terms[1][index])
        return Replacements(self.rows[index], terms)


@contextlib.contextmanager
def frozen(model: Aggregator) -> Iterator[None]:
    """No gradients, no dropout; the model's own mode comes back afterwards."""
    training = model.training
    if training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if training:
            model.train()
