"""Resampling of test slides: paired bootstrap intervals and paired randomisation tests of score differences.

Thousands of resamples are two matrix products: how often each slide is drawn [B, n] times the slides' cells of the
confusion matrix [n, C²] gives every resample's confusion matrix, and every score follows from its counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deco_ray.errors import DecoError
from deco_ray.keys import generator
from deco_ray.results.run_files import read_frame

RESAMPLES = 5000
LEVEL = 0.95
Groups = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Predictions:
    """Predicted classes of one method on the same slides, one row per seed."""

    slide_ids: tuple[str, ...]
    labels: np.ndarray  # int [n]
    predicted: np.ndarray  # int [seeds, n]
    seeds: tuple[int, ...]
    classes: int

    @classmethod
    def from_probabilities(cls, slide_ids: Sequence[str], labels, probabilities, seeds: Sequence[int]) -> Predictions:
        """From probabilities [seeds, n, C]; the predicted class is the most probable, ties to the lower index."""
        probabilities = np.asarray(probabilities)
        predicted = probabilities.argmax(axis=2)
        return cls(tuple(slide_ids), np.asarray(labels), predicted, tuple(seeds), probabilities.shape[2])

    @classmethod
    def read(cls, runs: Mapping[int, str | Path], split: str = "test") -> Predictions:
        """From the run folders of one method, {seed: folder}; slides are put in one order (by id)."""
        blocks: list[np.ndarray] = []
        ids: list[str] = []
        labels = np.empty(0, dtype=int)
        for seed, folder in runs.items():
            path = Path(folder) / "predictions.parquet"
            frame = read_frame(path)
            frame = frame[frame["split"] == split].sort_values("slide_id")
            if not len(frame):
                raise DecoError(f"{path} holds no predictions of split {split!r}; train the run again (seed {seed})")
            if not blocks:
                ids, labels = frame["slide_id"].tolist(), frame["label"].to_numpy()
            elif ids != frame["slide_id"].tolist() or not np.array_equal(labels, frame["label"].to_numpy()):
                raise DecoError(f"{path} was predicted on other slides or labels than the first seed's")
            width = sum(name.startswith("p_") for name in frame.columns)
            blocks.append(frame[[f"p_{c}" for c in range(width)]].to_numpy())
        if not blocks:
            raise DecoError("no runs to read predictions from")
        return cls.from_probabilities(ids, labels, np.stack(blocks), tuple(runs))


@dataclass(frozen=True)
class Difference:
    """A score of the second method minus the first's, with its bootstrap interval over test slides; fractions."""

    estimate: float
    low: float
    high: float


def scores(confusion: np.ndarray, groups: Groups) -> dict[str, np.ndarray]:
    """Scores [...] from confusion counts [..., true, predicted]; classes without slides are left out of every mean."""
    counts = np.asarray(confusion, dtype=float)
    hits = np.diagonal(counts, axis1=-2, axis2=-1)
    true, predicted = counts.sum(-1), counts.sum(-2)
    f1 = 2 * hits / np.maximum(true + predicted, 1)
    there = true.reshape(-1, counts.shape[-1]).sum(0) > 0  # drawn within classes: the same in all resamples
    result = {"acc": hits.sum(-1) / true.sum(-1), "macro_f1": f1[..., there].mean(-1)}
    for name, members in groups.items():
        present = [label for label in members if there[label]]
        if present:
            result[f"{name}_f1"] = f1[..., present].mean(-1)
    result |= {f"f1_{label}": f1[..., label] for label in np.flatnonzero(there)}
    return result


def cells(predictions: Predictions) -> np.ndarray:
    """Each slide's cell of each seed's confusion matrix, one-hot: float32 [seeds, n, C²]."""
    flat = predictions.labels[None, :] * predictions.classes + predictions.predicted
    return np.eye(predictions.classes**2, dtype=np.float32)[flat]


def draw_weights(labels: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """How often each slide is drawn in each resample, float32 [B, n].

    Drawn within each class, because test quotas per class are part of the protocol, not of chance.
    """
    weights = np.zeros((resamples, len(labels)), dtype=np.float32)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        rng = generator(seed, "bootstrap", int(label))
        drawn = rng.integers(0, len(rows), (resamples, len(rows))) + np.arange(resamples)[:, None] * len(rows)
        weights[:, rows] = np.bincount(drawn.ravel(), minlength=resamples * len(rows)).reshape(resamples, -1)
    return weights


def _mean_scores(weights: np.ndarray, one_hot: np.ndarray, groups: Groups) -> dict[str, np.ndarray]:
    """Scores of every resample, averaged over seeds: {metric: [B]}."""
    side = round(one_hot.shape[-1] ** 0.5)
    per_seed = [scores((weights @ block).reshape(-1, side, side), groups) for block in one_hot]
    return {name: np.mean([seed[name] for seed in per_seed], axis=0) for name in per_seed[0]}


def check_paired(first: Predictions, second: Predictions) -> None:
    if first.slide_ids != second.slide_ids or not np.array_equal(first.labels, second.labels):
        raise DecoError(
            "the two methods were tested on different slides: a paired comparison needs the same test split"
        )
    if first.classes != second.classes:
        raise DecoError(f"the two methods predict {first.classes} and {second.classes} classes")


def paired_bootstrap(
    first: Predictions,
    second: Predictions,
    groups: Groups,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> dict[str, Difference]:
    """Second minus first for every score (mean over seeds), percentile interval over test slides.

    The same slides are drawn for both methods and all seeds; the interval speaks of the choice of test slides and
    holds the trained models fixed. Keys: acc, macro_f1, <group>_f1, f1_<class>, where test slides exist.
    """
    check_paired(first, second)
    once = np.ones((1, len(first.labels)), dtype=np.float32)
    weights = np.concatenate([once, draw_weights(first.labels, resamples, seed)])
    before, after = _mean_scores(weights, cells(first), groups), _mean_scores(weights, cells(second), groups)
    differences = {}
    for name in before:
        change = after[name] - before[name]
        low, high = np.quantile(change[1:], [(1 - level) / 2, (1 + level) / 2])
        differences[name] = Difference(float(change[0]), float(low), float(high))
    return differences


def paired_randomisation(
    first: Predictions, second: Predictions, groups: Groups, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, float]:
    """Two-sided p-value of every score's difference when each slide's two predictions change places at random.

    Needs the same number of seeds in both methods: a slide's predictions swap together for all seeds.
    """
    check_paired(first, second)
    if len(first.seeds) != len(second.seeds):
        raise DecoError(
            f"a paired test needs as many seeds of both methods, not {len(first.seeds)} and {len(second.seeds)}"
        )
    rng = generator(seed, "randomisation")
    swap = np.concatenate([np.zeros((1, len(first.labels))), rng.integers(0, 2, (resamples, len(first.labels)))])
    swap = swap.astype(np.float32)
    side = first.classes
    differences: dict[str, np.ndarray] = {}
    for one, two in zip(cells(first), cells(second)):
        moved = swap @ (two - one)  # what the first method gains and the second loses by swapping
        before = scores((one.sum(0) + moved).reshape(-1, side, side), groups)
        after = scores((two.sum(0) - moved).reshape(-1, side, side), groups)
        for name in before:
            differences[name] = differences.get(name, 0.0) + (after[name] - before[name])
    # equal up to float rounding counts as extreme, so that ties never look significant
    return {
        name: float((1 + (np.abs(change[1:]) >= abs(change[0]) - 1e-9).sum()) / (resamples + 1))
        for name, change in differences.items()
    }
