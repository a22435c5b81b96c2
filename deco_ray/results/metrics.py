"""How good predictions are, overall and for head, medium and tail classes; a missing class never breaks a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, roc_auc_score

from deco_ray.errors import DecoError

ECE_BINS = 15  # the customary number of equal-width confidence bins


def evaluate(labels: Any, probabilities: Any, groups: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Metrics of probabilities [n, C] against labels [n] as plain Python numbers.

    A class without slides is listed under `missing` and left out of every mean over classes; what then
    has no value at all (AUC of a single class, F1 of an empty group) is None, never NaN.
    """
    truth = np.asarray(labels, dtype=np.int64)
    scores = np.asarray(probabilities, dtype=np.float64)
    check(truth, scores)
    n, classes = scores.shape
    every = np.arange(classes)
    predicted = scores.argmax(1)
    confusion = confusion_matrix(truth, predicted, labels=every)  # [true, predicted]
    _, recall, f1, support = precision_recall_fscore_support(truth, predicted, labels=every, zero_division=0.0)
    present = support > 0
    metrics: dict[str, Any] = {
        "n": n,
        "acc": float((predicted == truth).mean()),
        "auc": macro_auc(truth, scores),
        "macro_f1": float(f1[present].mean()),
        "balanced_acc": float(recall[present].mean()),
        "ece": calibration_error(truth, scores),
        "f1_per_class": [float(value) if there else None for value, there in zip(f1, present)],
        "support": [int(count) for count in support],
        "missing": [int(label) for label in every[~present]],
        "confusion": confusion.tolist(),
    }
    for group in ("head", "medium", "tail"):
        members = [label for label in groups.get(group, ()) if present[label]]
        metrics[f"{group}_f1"] = float(f1[members].mean()) if members else None
    return metrics


def macro_auc(truth: np.ndarray, scores: np.ndarray) -> float | None:
    """One-vs-rest AUC averaged over the classes present; None when fewer than two are."""
    present = np.unique(truth)
    if len(present) < 2:
        return None
    return float(np.mean([roc_auc_score(truth == label, scores[:, label]) for label in present]))


def calibration_error(truth: np.ndarray, scores: np.ndarray) -> float:
    """Expected calibration error: |accuracy - confidence| per bin of confidence, weighted by the bin's share."""
    confidence = scores.max(1)
    bins = np.minimum((confidence * ECE_BINS).astype(np.int64), ECE_BINS - 1)
    correct = (scores.argmax(1) == truth).astype(np.float64)
    gap = np.bincount(bins, correct - confidence, minlength=ECE_BINS)  # Σ over the bin: its share times its gap
    return float(np.abs(gap).sum() / len(truth))


def check(truth: np.ndarray, scores: np.ndarray) -> None:
    if truth.ndim != 1 or scores.ndim != 2 or len(truth) != len(scores):
        raise DecoError(f"labels {truth.shape} and probabilities {scores.shape} must be [n] and [n, C]")
    if not len(truth):
        raise DecoError("no slides to evaluate; give the split at least one validation and one test slide")
    if truth.min() < 0 or truth.max() >= scores.shape[1]:
        raise DecoError(f"labels reach from {truth.min()} to {truth.max()}, but there are {scores.shape[1]} classes")
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores)).any(1).sum())
        raise DecoError(f"{bad} of {len(scores)} predictions are not finite; the model diverged, lower training.lr")
