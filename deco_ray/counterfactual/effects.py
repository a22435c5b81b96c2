"""Debiased counterfactual contributions of one slide's anchors (Eq. 5-8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from deco_ray.counterfactual.brute import brute_outcomes
from deco_ray.counterfactual.exact import exact_outcomes
from deco_ray.counterfactual.replacements import Replacements, frozen
from deco_ray.errors import ModelError
from deco_ray.models.protocol import Aggregator, SoftmaxPooling

Method = Literal["auto", "exact", "brute"]


@dataclass(frozen=True)
class Contributions:
    """What each non-empty anchor contributes to every class of one slide."""

    anchors: np.ndarray  # int64 [k], non-empty, ascending
    counts: np.ndarray  # int64 [k], patches of each
    effects: np.ndarray  # float64 [k, C]: E' (Eq. 7)
    attention: np.ndarray  # float64 [k], mean over the anchor's patches
    label: int
    rival: int  # ỹ: the likeliest other class of the unintervened slide
    log_probabilities: np.ndarray  # float64 [C], calibrated (Eq. 6), of the unintervened slide

    def scores(self, lam: float) -> np.ndarray:
        """s = E'ʸ - λ E'ʸ~, [k]. Eq. 8"""
        return self.effects[:, self.label] - lam * self.effects[:, self.rival]


def contributions(
    model: Aggregator,
    bag: Tensor,
    assignment: ArrayLike | Tensor,
    replacements: ArrayLike | Tensor | Replacements,
    log_prior: ArrayLike | Tensor,
    label: int | None = None,
    tau: float = 1.0,
    method: Method = "auto",
    memory_cap_mb: int = 512,
) -> Contributions:
    """E' of every class and non-empty anchor of one slide, with the rival fixed on the unintervened slide.

    bag [N, d], assignment [N], replacements [K, d] (or prepared once per judge), log_prior [C]. Without a
    label the slide's calibrated prediction takes its place. `exact` needs one instance pass and a model that
    pools by softmax; `brute` runs every intervention through any model; `auto` is exact where possible.
    """
    if method == "exact" and not isinstance(model, SoftmaxPooling):
        raise ModelError(
            f"{type(model).__name__} does not pool by a softmax-weighted sum; use method 'brute' or 'auto'"
        )
    anchors, counts, segment = group(assignment, len(bag))
    with frozen(model):
        prepared = replacements if isinstance(replacements, Replacements) else Replacements.prepare(model, replacements)
        check(model, bag, anchors, prepared)
        bag = bag.to(prepared.rows)
        rows = prepared.take(anchors)
        if method != "brute" and isinstance(model, SoftmaxPooling) and rows.terms is not None:
            outcomes = exact_outcomes(model, bag, segment, counts, rows.terms)
        else:
            outcomes = brute_outcomes(model, bag, segment, counts, rows.rows, memory_cap_mb * 2**20)
    before = calibrated(outcomes.factual, log_prior, tau)  # [C]
    after = calibrated(outcomes.intervened, log_prior, tau)  # [k, C]
    label = int(before.argmax()) if label is None else int(label)
    return Contributions(
        anchors=anchors,
        counts=counts,
        effects=before - after,  # Eq. 7
        attention=outcomes.attention,
        label=label,
        rival=rival(before, label),
        log_probabilities=before,
    )


def calibrated(logits: Tensor, log_prior: ArrayLike | Tensor, tau: float) -> np.ndarray:
    """log softmax(f(X) - τ log π) over the last axis, in float64. Eq. 6"""
    adjusted = logits.detach().to("cpu", torch.float64)
    if tau:
        prior = torch.as_tensor(np.asarray(log_prior), dtype=torch.float64)
        if prior.shape != logits.shape[-1:] or not bool(prior.isfinite().all()):
            raise ModelError(
                f"the class prior must be finite for each of the {logits.shape[-1]} classes, got log prior "
                f"{prior.tolist()}; a class without training slides has none: set counterfactual.tau=0 or change "
                "the split"
            )
        adjusted = adjusted - tau * prior
    return adjusted.log_softmax(-1).numpy()


def log_prior(train_counts: ArrayLike) -> np.ndarray:
    """log π_c, π_c = n_c / Σ n; -inf for a class without training slides. [C]"""
    counts = np.asarray(train_counts, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return np.log(counts) - np.log(counts.sum())


def rival(log_probabilities: np.ndarray, label: int) -> int:
    """ỹ = argmax over c ≠ y of p'(c|X)."""
    if not 0 <= label < len(log_probabilities) or len(log_probabilities) < 2:
        raise ModelError(f"label {label} has no rival among {len(log_probabilities)} classes")
    others = log_probabilities.copy()
    others[label] = -np.inf
    return int(others.argmax())


def group(assignment: ArrayLike | Tensor, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Non-empty anchors [k], their sizes [k], and each patch's position among them [N]."""
    assignment = np.asarray(assignment, dtype=np.int64)
    if n == 0 or assignment.shape != (n,) or assignment.min() < 0:
        raise ModelError(
            f"a bag of {n} patches needs one anchor per patch; the assignment has shape {assignment.shape}"
        )
    sizes = np.bincount(assignment)
    anchors = np.flatnonzero(sizes)
    position = np.zeros(len(sizes), dtype=np.int64)
    position[anchors] = np.arange(len(anchors))
    return anchors, sizes[anchors], position[assignment]


def check(model: Aggregator, bag: Tensor, anchors: np.ndarray, replacements: Replacements) -> None:
    k, dim = replacements.rows.shape
    if bag.ndim != 2 or bag.shape[1] != model.dim or dim != model.dim:
        raise ModelError(
            f"{type(model).__name__} takes {model.dim}-dimensional features; the bag has shape {tuple(bag.shape)}, "
            f"the replacements {(k, dim)}"
        )
    if anchors[-1] >= k:
        raise ModelError(f"the assignment names anchor {anchors[-1]}, but there are only {k} replacements")
