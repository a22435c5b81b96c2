"""The canvas of every figure: sizes of a paper's columns, a colour-blind-safe palette, PNG and PDF side by side.

Only matplotlib's object interface: no pyplot, no global figure list, nothing to close in a long-lived worker.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from deco_ray.artefacts import write_atomically

COLUMN = 3.4  # inches: one column of a two-column paper
PAGE = 7.0  # inches: both columns
DPI = 200

# Okabe and Ito: told apart by all common kinds of colour vision; black last, it is the colour of text
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vP*X"  # shape repeats what colour says, for print in grey
GROUP_COLOURS = {"head": "#0072B2", "medium": "#E69F00", "tail": "#D55E00"}
METRIC_NAMES = {
    "acc": "ACC",
    "auc": "AUC",
    "macro_f1": "Macro-F1",
    "head_f1": "Head-F1",
    "medium_f1": "Medium-F1",
    "tail_f1": "Tail-F1",
    "balanced_acc": "Balanced ACC",
    "ece": "ECE",
}
INK, FAINT, GRID = "#222222", "#8a8a8a", "#dddddd"
STYLE: Any = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib: the same picture on every machine
    "font.size": 8,
    "text.parse_math": False,  # class names come from the data; a $ in one is a dollar
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,  # text stays text: journals refuse Type 3 fonts
    "svg.hashsalt": "deco_ray",
}


def styled(function):
    """Draw under our style without touching the user's matplotlib settings."""
    return matplotlib.rc_context(STYLE)(function)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure in inches with rows x columns axes, listed row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def metric_name(metric: str) -> str:
    return METRIC_NAMES.get(metric, metric)


def png_bytes(figure: Figure, dpi: int = DPI) -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def pdf_bytes(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(
            buffer, format="pdf", dpi=DPI, metadata={"CreationDate": None, "Creator": None, "Producer": None}
        )
    return buffer.getvalue()


def save_figure(figure: Figure, folder: str | Path, name: str, pdf: bool = True) -> Path:
    """Write <name>.png (200 dpi) and, if asked for, <name>.pdf into the folder; returns the PNG's path."""
    path = Path(folder) / f"{name}.png"
    write_atomically(path, png_bytes(figure))
    if pdf:
        write_atomically(path.with_suffix(".pdf"), pdf_bytes(figure))
    return path
