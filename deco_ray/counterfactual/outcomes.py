"""What a judge says of a slide and of each intervention on it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    factual: Tensor  # [C] logits of the unintervened slide
    intervened: Tensor  # [k, C] logits with one anchor replaced
    attention: np.ndarray  # float64 [k], mean attention of each anchor's patches


def anchor_means(attention: Tensor, segment: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean over each anchor's patches; attention [N], segment [N] in 0..k-1, counts [k] -> float64 [k]."""
    weights = attention.detach().double().cpu().numpy()
    return np.bincount(segment, weights, len(counts)) / counts
