"""From anchor scores to masking ratios: the paper's map (Eq. 9) and the strategies it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deco_ray.config import MaskingSection
from deco_ray.keys import generator

# Spreads below float32's rounding are no spread: a mean-pooling judge gives every patch "the same" attention.
SAME = 1e-6


def masking_ratios(scores: Sequence[float] | np.ndarray, r_max: float, eps: float = 1e-8) -> np.ndarray:
    """r_k = r_max (1 - Norm(s_k)) over the non-empty anchors of one slide; equal scores all give r_max. Eq. 9

    scores [k] -> float64 [k].
    """
    scores = np.asarray(scores, dtype=np.float64)
    if not len(scores):
        return scores
    low = scores.min()
    return r_max * (1.0 - (scores - low) / (scores.max() - low + eps))


def random_ratios(causal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The slide's causal ratios in a random order: same multiset, other anchors."""
    return causal[rng.permutation(len(causal))]


def size_ratios(counts: Sequence[int] | np.ndarray, r_max: float) -> np.ndarray:
    """Larger anchors lose more; anchors of one size lose nothing."""
    return r_max * _unit_range(np.asarray(counts, dtype=np.float64), same=0.0, degenerate=0.0)


def attention_ratios(attention: Sequence[float] | np.ndarray, r_max: float) -> np.ndarray:
    """Anchors of low mean attention lose more; anchors of one attention lose nothing."""
    return r_max * (1.0 - _unit_range(np.asarray(attention, dtype=np.float64), same=SAME, degenerate=1.0))


def _unit_range(values: np.ndarray, same: float, degenerate: float) -> np.ndarray:
    if not len(values):
        return values
    low, high = values.min(), values.max()
    if high - low <= same * max(abs(low), abs(high)):
        return np.full(len(values), degenerate)
    return (values - low) / (high - low)


def anchor_ratios(
    section: MaskingSection,
    scores: np.ndarray,
    counts: np.ndarray,
    attention: np.ndarray,
    seed: int,
    slide_id: str,
) -> np.ndarray:
    """The ratios of one slide's non-empty anchors under the configured strategy; all arguments and the result [k]."""
    if section.strategy == "none":
        return np.zeros(len(scores))
    if section.strategy == "size":
        return size_ratios(counts, section.r_max)
    if section.strategy == "attention":
        return attention_ratios(attention, section.r_max)
    causal = masking_ratios(scores, section.r_max, section.eps)
    if section.strategy == "random":
        return random_ratios(causal, generator(seed, "random masking", slide_id))
    return causal
