"""Figures show the numbers they were given, and equal figures are equal files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from deco_ray.results import canvas
from deco_ray.results.canvas import png_bytes, save_figure
from deco_ray.results.figures import (
    class_change_figure,
    class_distribution,
    confusion_figure,
    group_f1_bars,
    imbalance_figure,
    sweep_figure,
    training_curves,
)
from deco_ray.results.statistics import ClassChange


def results(methods=("abmil", "deco")) -> pd.DataFrame:
    rows = [
        (method, seed, metric, 0.3 + 0.1 * number + 0.02 * seed)
        for number, method in enumerate(methods)
        for seed in range(3)
        for metric in ("macro_f1", "head_f1", "tail_f1")
    ]
    return pd.DataFrame(rows, columns=["method", "seed", "metric", "value"])


def test_files_are_png_at_200_dpi_and_pdf_and_reproducible(tmp_path):
    for name in ("a", "b"):
        path = save_figure(group_f1_bars(results()), tmp_path, name)
        assert path == tmp_path / f"{name}.png"
    for suffix in (".png", ".pdf"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    with Image.open(tmp_path / "a.png") as image:
        assert round(image.info["dpi"][0]) == 200
        assert image.width == pytest.approx(3.4 * 200, abs=2)  # one column of a paper
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    assert b"Date" not in (tmp_path / "a.pdf").read_bytes()


def test_bars_are_means_in_percent_and_empty_groups_leave_no_gap():
    (axes,) = group_f1_bars(results()).axes
    heights = [bar.get_height() for bars in axes.containers if hasattr(bars, "patches") for bar in bars.patches]
    assert heights == pytest.approx([32, 32, 32, 42, 42, 42])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["Macro-F1", "Head-F1", "Tail-F1"]


def test_curves_of_all_seeds_with_their_mean():
    runs = [pd.DataFrame({"epoch": [0, 1, 2], "loss": [3.0, 2.0, 1.0 + seed]}) for seed in range(3)]
    runs[2] = runs[2].iloc[:2]  # stopped early
    (axes,) = training_curves({"Judge": runs}, {"loss": "Loss", "absent": "Absent"}).axes[:1]
    assert len(axes.lines) == 4
    assert axes.lines[-1].get_ydata().tolist() == [3, 2, 1.5]
    assert all(line.get_xdata()[0] == 1 for line in axes.lines)  # as the console counts


def test_confusion_shows_counts():
    (axes, _) = confusion_figure(np.array([[5, 1], [2.5, 4]]), ["normal", "tumour of a long name"]).axes
    assert [text.get_text() for text in axes.texts] == ["5", "1", "2.5", "4"]


def test_a_dollar_in_a_class_name_is_a_dollar():
    png_bytes(confusion_figure(np.eye(2), ["$5_$", "\\x$^$"]))


@pytest.mark.parametrize("values", [(0.0, 0.6, 1.0), ("random", "size", "counterfactual")])
def test_sweep_marks_the_default(values):
    scores = {"macro_f1": {value: [0.5, 0.6] for value in values}, "tail_f1": {value: [0.1] for value in values}}
    figure = sweep_figure({"a": scores, "b": scores, "c": scores, "d": scores}, setting="λ", default=values[1])
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == 4
    assert all(f"default {values[1]}" in [text.get_text() for text in axes.texts] for axes in shown)
    assert shown[0].lines[0].get_ydata() == pytest.approx([55, 55, 55])


@pytest.mark.parametrize("count", [2, 12])
def test_error_bars_at_one_value_stand_side_by_side(count):
    scores = {f"m{number}": {16: [0.5, 0.6], 32: [0.4, 0.6]} for number in range(count)}
    figure = sweep_figure({"a": scores}, setting="K")
    figure.canvas.draw()
    (axes,) = figure.axes
    points = 72 / figure.dpi
    bars = [
        bars.get_transform().transform(bars.get_segments()[0])[0, 0] * points for bars in axes.collections
    ]  # where each series' bar at 16 stands, in points
    assert np.diff(bars).min() > 0.7
    middle = axes.transData.transform((16, 0))[0] * points
    assert np.mean(bars) == pytest.approx(middle)
    assert max(np.abs(np.asarray(bars) - middle)) < 5
    assert axes.get_ylim()[0] < 40  # the bars are within the picture
    assert axes.get_xlim()[0] < 16


def test_imbalance_writes_gains():
    study = {
        "abmil": {"macro_f1": {10: [0.5], 50: [0.4]}, "tail_f1": {10: [0.4], 50: [0.1]}},
        "deco": {"macro_f1": {10: [0.5], 50: [0.5]}, "tail_f1": {10: [0.38], 50: [0.35]}},
    }
    figure = imbalance_figure(study, gain_of="deco")
    assert [text.get_text() for text in figure.axes[1].texts] == ["−2.0", "+25.0"]


def test_class_pictures():
    figure = class_distribution([10, 300, 40], ["a", "b", "c"], {"head": [1], "medium": [2], "tail": [0]})
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["b", "c", "a"]
    assert figure.axes[0].get_title() == "Imbalance ratio 30.0"
    change = [ClassChange(0, "a", 0.5, 0.4, -0.2, -0.05), ClassChange(1, "b", 0.1, 0.4, 0.31, 0.4)]
    assert png_bytes(class_change_figure(change)).startswith(b"\x89PNG")


def test_pyplot_is_never_imported():
    for path in Path(canvas.__file__).parent.glob("*.py"):
        assert not re.search(r"import.*pyplot|matplotlib\.use", path.read_text()), path
