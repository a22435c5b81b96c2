"""Why this slide, seen on the slide: anchors, debiased contributions, expected retention and attention (Figure 6)."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, ListedColormap, Normalize, hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from deco_ray.cohort.schema import check_slide_id
from deco_ray.errors import DecoError
from deco_ray.results.canvas import FAINT, INK, save_figure, styled
from deco_ray.results.geojson import write_geojson, write_patch_table
from deco_ray.results.lesions import Lesion, read_lesions
from deco_ray.results.raster import PatchRaster, patch_size_of
from deco_ray.results.thumbnail import Thumbnail, read_thumbnail

PANEL = 2.4  # inches
SHAPES = (0.45, 1.7)  # height over width of a panel: longer slides get empty margins
CLIP = 99.0  # percentile at which attention saturates, so that one extreme patch does not wash out the rest
LEAST_EFFECT = 1e-3  # where the contribution's scale ends at the least: tables show less as 0.000
HEADING = 110  # characters of a line that fit across a page in bold, capitals too
LESION_INK = "#FFD700"


@dataclass(frozen=True)
class SlideMaps:
    """What is known of each patch of one slide; None where it has no such values (contribution of normal slides)."""

    slide_id: str
    coords: np.ndarray | None  # int [N, 2], top-left corners in level-0 pixels
    assignment: np.ndarray  # int [N], anchor of each patch
    contribution: np.ndarray | None = None  # [N], E' of the patch's anchor
    retention: np.ndarray | None = None  # [N], 1 - r of the patch's anchor
    attention: np.ndarray | None = None  # [N]
    patch_size: float | None = None  # level-0 pixels; None: told from the grid
    level0: tuple[int, int] | None = None  # width and height of the slide
    title: str = ""  # e.g. label and prediction
    image: str | Path | None = None  # the slide file or a picture of it
    annotation: str | Path | None = None  # lesion outlines or mask

    def values(self) -> dict[str, np.ndarray]:
        """The values there are, by the names used in files."""
        known = {"contribution": self.contribution, "retention": self.retention, "attention": self.attention}
        return {name: np.asarray(value) for name, value in known.items() if value is not None}


def check_maps(maps: SlideMaps) -> np.ndarray:
    """The coordinates, after every check a drawing relies on."""
    check_slide_id(maps.slide_id)
    if maps.coords is None:
        raise DecoError(
            f"slide {maps.slide_id} has no patch coordinates, so there is nothing to draw it on; "
            "ingest features that carry them (`coords` in the .h5 file)"
        )
    coords = np.asarray(maps.coords)
    count = len(maps.assignment)
    if coords.shape != (count, 2) or count == 0:
        raise DecoError(f"slide {maps.slide_id}: coordinates {coords.shape} for {count} patches; expected ({count}, 2)")
    for name, values in maps.values().items():
        if values.shape != (count,):
            raise DecoError(f"slide {maps.slide_id}: {name} has shape {values.shape} for {count} patches")
    return coords


@styled
def heatmap_figure(maps: SlideMaps) -> Figure:
    """Five panels: tissue, anchors, contribution around zero, expected retention, attention; lesion outlines on all."""
    coords = check_maps(maps)
    size = patch_size_of(coords, maps.patch_size, maps.slide_id)
    raster = PatchRaster(coords, size)
    thumbnail = read_thumbnail(maps.image, maps.level0) if maps.image is not None else None
    if thumbnail is not None:
        _check_fits(maps, thumbnail, raster, size)
    level0 = maps.level0 or (thumbnail.level0 if thumbnail else None)
    lesions = read_lesions(maps.annotation, level0) if maps.annotation is not None else []
    heading = textwrap.wrap(f"{maps.slide_id}   {maps.title}", HEADING)
    page = Page(raster, size, lines=len(heading))
    for number, axes in enumerate(page.panels):
        _tissue(axes, thumbnail, grey=number > 0)
    if thumbnail is None:
        _paint(page.panels[0], raster.mean(np.ones(len(coords))), raster, ListedColormap(["#b9a3b4"]), Normalize(0, 2))
    alpha = 1.0 if thumbnail is None else 0.62
    page.panels[0].set_title("Tissue" if thumbnail is not None else "Tissue layout")
    _anchors(page, maps, raster, alpha)
    _contribution(page, maps, raster, alpha)
    _scale(page, 3, maps.retention, raster, alpha, "Expected retention", "1 − r", "Greens", Normalize(0, 1))
    relative, top = None, 1.0
    if maps.attention is not None:
        relative = np.asarray(maps.attention, dtype=float) * len(coords) / max(float(np.sum(maps.attention)), 1e-30)
        # never below the uniform share: else all but the one patch that has it all would look like that patch
        top = max(float(np.percentile(relative, CLIP)), 1.0)
    _scale(page, 4, relative, raster, alpha, "Attention", "times the uniform share", "magma_r", Normalize(0, top))
    for axes in page.panels:
        _outline(axes, lesions)
    page.write("\n".join(heading), _caption(len(coords), size, raster, lesions))
    return page.figure


class Page:
    """Five equal panels with a strip for a colour bar below each, placed in inches: no slide's shape upsets it."""

    LEFT, GAP, TOP, LINE, BOTTOM = 0.12, 0.16, 0.45, 0.17, 0.78

    def __init__(self, raster: PatchRaster, patch_size: float, lines: int = 1) -> None:
        margin = max(patch_size, 0.02 * float((raster.high - raster.low).max()))
        low, high = raster.low - margin, raster.high + margin
        width, height = high - low
        shape = float(np.clip(height / width, *SHAPES))
        middle = (low + high) / 2
        half = np.array([max(width, height / shape), max(height, width * shape)]) / 2  # the panel's shape, in pixels
        self.width = 2 * self.LEFT + 5 * PANEL + 4 * self.GAP
        self.height = self.TOP + lines * self.LINE + PANEL * shape + self.BOTTOM
        self.figure = Figure(figsize=(self.width, self.height))
        FigureCanvasAgg(self.figure)
        self.panels = [self._axes(number, self.BOTTOM, PANEL, PANEL * shape) for number in range(5)]
        for axes in self.panels:
            axes.set_xlim(middle[0] - half[0], middle[0] + half[0])
            axes.set_ylim(middle[1] + half[1], middle[1] - half[1])
            axes.set_autoscale_on(False)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)

    def _axes(self, number: int, bottom: float, width: float, height: float) -> Axes:
        left = self.LEFT + number * (PANEL + self.GAP) + (PANEL - width) / 2
        box = (left / self.width, bottom / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(box)

    def bar(self, number: int, cmap: str, norm: Normalize, label: str, extend: str) -> None:
        """A colour bar of its own, opaque under a translucent map."""
        axes = self._axes(number, self.BOTTOM - 0.16, PANEL * 0.86, 0.09)
        self.figure.colorbar(ScalarMappable(norm, cmap), cax=axes, orientation="horizontal", extend=extend)
        axes.set_xlabel(label, fontsize=7.5, labelpad=1)
        axes.tick_params(labelsize=7, pad=1.5, length=2)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)  # a power of ten would run into the label

    def write(self, heading: str, caption: str) -> None:
        left = self.LEFT / self.width
        top = 1 - 0.1 / self.height
        self.figure.text(left, top, heading, va="top", fontsize=10, fontweight="bold", color=INK, parse_math=False)
        self.figure.text(left, 0.07 / self.height, caption, va="bottom", fontsize=7.5, color="#666666")


def _caption(count: int, size: float, raster: PatchRaster, lesions: list[Lesion]) -> str:
    width, height = raster.high - raster.low
    text = f"{count:,} patches of {size:,.0f} px; tissue {width:,.0f} × {height:,.0f} px at level 0"
    return text + ("; yellow: annotated lesions" if lesions else "")


def _check_fits(maps: SlideMaps, thumbnail: Thumbnail, raster: PatchRaster, size: float) -> None:
    """Refuse a picture that ends before the patches do, by more than the patch that may stick out of a slide."""
    if (raster.high <= np.add(thumbnail.level0, size)).all():
        return
    (right, bottom), (width, height) = raster.high, thumbnail.level0
    hint = "" if maps.level0 else " (a reduced one only where the features state the slide's size, as TRIDENT's do)"
    raise DecoError(
        f"slide {maps.slide_id}: its patches reach to {right:.0f} x {bottom:.0f} px at level 0, but {maps.image} ends "
        f"at {width} x {height}; give the slide's own file or a picture of all of it{hint}, or draw without it"
    )


def _tissue(axes: Axes, thumbnail: Thumbnail | None, grey: bool) -> None:
    if thumbnail is None:
        axes.set_facecolor("#e2e2e2")  # darker than the white of a zero contribution
        return
    image: Any = thumbnail.image
    if grey:  # colour belongs to the values there
        image = np.repeat(image.mean(2, keepdims=True), 3, axis=2).astype(np.uint8)
    width, height = thumbnail.level0
    axes.imshow(image, extent=(0, width, height, 0), aspect="auto", interpolation="antialiased")


def _paint(
    axes: Axes, values: np.ndarray, raster: PatchRaster, cmap: Colormap | str, norm: Normalize, alpha: float = 1.0
) -> None:
    axes.imshow(
        np.ma.masked_invalid(values),
        extent=raster.extent,
        cmap=cmap,
        norm=norm,
        alpha=alpha,
        aspect="auto",
        interpolation="nearest",
    )


def _missing(axes: Axes, title: str, why: str) -> None:
    axes.set_title(title)
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=7.5)


def anchor_colours(count: int) -> np.ndarray:
    """Colours [count, 3]: neighbouring numbers far apart in hue, three lightnesses so that similar hues differ."""
    number = np.arange(count)
    hue = (number * 0.6180339887) % 1.0  # golden ratio steps spread evenly for any count
    value = np.choose(number % 3, [0.92, 0.72, 0.52])
    saturation = np.choose(number % 2, [0.75, 0.45])
    return hsv_to_rgb(np.stack([hue, saturation, value], 1))


def _anchors(page: Page, maps: SlideMaps, raster: PatchRaster, alpha: float) -> None:
    axes = page.panels[1]
    assignment = np.asarray(maps.assignment, dtype=int)
    count = int(assignment.max()) + 1
    colours = ListedColormap(anchor_colours(count))
    _paint(axes, raster.last(assignment), raster, colours, Normalize(-0.5, count - 0.5), alpha)
    axes.set_title(f"Anchors, {len(np.unique(assignment))} present")
    if maps.contribution is not None:
        rank, name = np.asarray(maps.contribution, dtype=float), "highest contribution"
    else:
        rank, name = np.bincount(assignment, minlength=count)[assignment].astype(float), "most patches"
    best = [int(anchor) for anchor in dict.fromkeys(assignment[np.argsort(-rank, kind="stable")])][:5]
    marks = [Line2D([], [], marker="s", linestyle="", color=colours(anchor), label=str(anchor)) for anchor in best]
    axes.legend(
        handles=marks,
        title=f"anchors of {name}",
        title_fontsize=7.5,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=5,
        handletextpad=0.1,
        columnspacing=0.8,
        fontsize=7.5,
        borderpad=0.1,
    )


def _contribution(page: Page, maps: SlideMaps, raster: PatchRaster, alpha: float) -> None:
    title = "Debiased contribution"
    if maps.contribution is None:
        _missing(page.panels[2], title, "none: the normal class\nis not scored")
        return
    # symmetric, so that zero is white and red always means evidence for the class
    # up to the largest: an anchor of few patches is no outlier but what the panel is to show
    limit = max(float(np.abs(maps.contribution).max()), LEAST_EFFECT)
    norm = Normalize(-limit, limit)
    _paint(page.panels[2], raster.mean(maps.contribution), raster, "RdBu_r", norm, alpha if alpha == 1 else 0.8)
    page.panels[2].set_title(title)
    page.bar(2, "RdBu_r", norm, "against  ←  E′  →  for the class", "neither")


def _scale(
    page: Page,
    number: int,
    values: np.ndarray | None,
    raster: PatchRaster,
    alpha: float,
    title: str,
    label: str,
    cmap: str,
    norm: Normalize,
) -> None:
    if values is None:
        _missing(page.panels[number], title, "not computed\nfor this slide")
        return
    _paint(page.panels[number], raster.mean(values), raster, cmap, norm, alpha)
    page.panels[number].set_title(title)
    page.bar(number, cmap, norm, label, "max" if cmap == "magma_r" else "neither")


def _outline(axes: Axes, lesions: list[Lesion]) -> None:
    for lesion in lesions:
        closed = np.concatenate([lesion.points, lesion.points[:1]])
        dark = patheffects.withStroke(linewidth=2.2, foreground=INK)  # yellow alone drowns on pale tissue
        axes.plot(*closed.T, color=LESION_INK, linewidth=1.1, path_effects=[dark], scalex=False, scaley=False)


def write_slide(maps: SlideMaps, folder: str | Path, figure: bool = True, geojson: bool = True) -> Path:
    """<slide_id>.png and .pdf, .geojson (QuPath), .parquet in the folder; returns the folder."""
    coords = check_maps(maps)
    folder = Path(folder)
    size = patch_size_of(coords, maps.patch_size, maps.slide_id)
    if figure:
        save_figure(heatmap_figure(maps), folder, maps.slide_id)
    columns = {"anchor": np.asarray(maps.assignment), **maps.values()}
    if geojson:
        write_geojson(folder / f"{maps.slide_id}.geojson", maps.slide_id, coords, size, columns)
    write_patch_table(folder / f"{maps.slide_id}.parquet", maps.slide_id, coords, size, columns)
    return folder
