"""One picture of the anchors: how large they are, which classes they hold, where they and their normals lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from deco_ray.anchors.artefact import Anchors
from deco_ray.anchors.assignments import load_counts
from deco_ray.cohort.store import Cohort

# Okabe and Ito's colours, told apart by readers with any kind of colour vision
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#999999")
INK, GREY = "#222222", "#8a8a8a"
HATCHES = ("", "////", "....", "xxxx")  # classes beyond the eighth repeat a colour with a hatch


def anchor_figure(folder: str | Path, cohort: Cohort) -> Figure:
    """Anchor sizes, class composition of each anchor, and a map of anchors and matched normal prototypes."""
    anchors = Anchors.load(folder)
    counts, labels = load_counts(folder)
    by_class = np.stack([counts[labels == label].sum().to_numpy() for label in range(len(cohort.classes))])  # [C, K]
    shares = class_shares(by_class)
    order = np.argsort(-by_class.sum(axis=0), kind="stable")  # largest anchor first
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.15, 1))
    sizes, mixture = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    _sizes(sizes, by_class.sum(axis=0)[order])
    _composition(mixture, shares[:, order], order, cohort.classes)
    _map(figure.add_subplot(grid[:, 1]), anchors, by_class.sum(axis=0), shares.argmax(axis=0))
    figure.suptitle(f"{cohort.name}: {anchors.k} anchors of {len(labels)} training slides", fontsize=12)
    return figure


def _sizes(axes: Axes, sizes: np.ndarray) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.85, color=GREY)
    axes.set(title="Patches of each anchor", ylabel="training patches", xlim=(-0.7, len(sizes) - 0.3), xticks=[])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)


def class_shares(by_class: np.ndarray) -> np.ndarray:
    """Share of each class in each anchor [C, K], all classes weighted alike: else every anchor shows the long tail."""
    within = by_class / np.maximum(by_class.sum(axis=1, keepdims=True), 1)
    return within / np.maximum(within.sum(axis=0, keepdims=True), 1e-12)


def _composition(axes: Axes, shares: np.ndarray, order: np.ndarray, classes: tuple[str, ...]) -> None:
    base = np.zeros(len(order))
    for label, name in enumerate(classes):
        axes.bar(
            np.arange(len(order)),
            shares[label],
            bottom=base,
            width=0.85,
            label=name,
            color=COLOURS[label % len(COLOURS)],
            hatch=HATCHES[label // len(COLOURS) % len(HATCHES)],
        )
        base += shares[label]
    every = max(1, len(order) // 16)
    axes.set(
        title="Classes in each anchor (class totals made equal)",
        xlabel="anchor, largest first",
        ylabel="share of patches",
        xlim=(-0.7, len(order) - 0.3),
        ylim=(0, 1),
    )
    axes.set_xticks(np.arange(len(order))[::every], [str(anchor) for anchor in order[::every]], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(4, len(classes)), frameon=False, fontsize=9)


def _map(axes: Axes, anchors: Anchors, sizes: np.ndarray, leading: np.ndarray) -> None:
    """Anchors in the colour of the class with the largest share, each joined to its normal prototype."""
    places, explained = project(np.concatenate([anchors.anchors, anchors.normals]))
    ours, normals = places[: anchors.k], places[anchors.k :]
    lines = np.stack([ours, normals[anchors.match]], axis=1)
    axes.add_collection(LineCollection(list(lines), colors=GREY, linewidths=0.7, alpha=0.6, zorder=1))
    area = 15 + 220 * sizes / max(1, sizes.max())
    colours = [COLOURS[label % len(COLOURS)] for label in leading]
    axes.scatter(ours[:, 0], ours[:, 1], s=area, color=colours, alpha=0.8, edgecolors="white", zorder=2)
    used = np.isin(np.arange(len(normals)), anchors.match)
    for shown, fill, name in ((used, INK, "matched normal prototype"), (~used, "none", "unmatched normal prototype")):
        x, y = normals[shown].T
        axes.scatter(x, y, s=38, marker="^", facecolors=fill, edgecolors=INK, label=name, zorder=3)
    axes.set(
        title="Anchors (area: patches, colour: leading class)\nand their matched normal prototypes",
        xlabel=f"first principal component ({explained[0]:.0%})",
        ylabel=f"second ({explained[1]:.0%})",
    )
    axes.margins(0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2, frameon=False, fontsize=9)


def project(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first two principal components [n, 2] and their shares of the variance [2].

    The largest loading of each component is made positive, so that the map does not flip between runs.
    """
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    _, scale, axes = np.linalg.svd(centred, full_matrices=False)
    axes = np.concatenate([axes, np.zeros((2, axes.shape[1]))])[:2]  # two rows to cluster may span less than a plane
    largest = np.abs(axes).argmax(axis=1)
    axes = axes * np.where(axes[np.arange(2), largest] < 0, -1.0, 1.0)[:, None]
    shares = np.concatenate([scale**2, [0.0, 0.0]])[:2] / max(float((scale**2).sum()), 1e-300)
    return centred @ axes.T, shares
