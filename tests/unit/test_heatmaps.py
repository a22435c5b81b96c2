"""Painting patches against a pixel-by-pixel oracle, heatmap pages, and annotations of all three kinds."""

from __future__ import annotations

import builtins
import itertools
import json
import time

import numpy as np
import pytest
from PIL import Image

from deco_ray.errors import DecoError
from deco_ray.keys import generator
from deco_ray.results import thumbnail
from deco_ray.results.heatmaps import SlideMaps, anchor_colours, heatmap_figure, write_slide
from deco_ray.results.lesions import lesion_patches, read_lesions
from deco_ray.results.raster import PatchRaster, patch_size_of
from deco_ray.results.thumbnail import read_thumbnail

SQUARE = [[100.0, 100], [900, 100], [900, 900], [100, 900], [100, 100]]
HOLE = [[400.0, 400], [600, 400], [600, 600], [400, 600], [400, 400]]


def maps(n=12, slide_id="s1", **changes) -> SlideMaps:
    rng = generator(0, "heatmap test")
    coords = np.stack([np.arange(n) % 4, np.arange(n) // 4], 1) * 256 + 1000
    given = {
        "assignment": rng.integers(0, 5, n),
        "contribution": rng.normal(size=n),
        "retention": rng.random(n),
        "attention": rng.random(n),
        "patch_size": 256.0,
    }
    return SlideMaps(slide_id, coords, **(given | changes))


def test_a_grid_is_painted_without_gaps_and_every_pixel_shows_its_own_patch():
    coords = np.array([(x, y) for y in range(9) for x in range(13)]) * 512 + 77
    values = np.arange(len(coords), dtype=float)
    raster = PatchRaster(coords, 512)
    image = raster.mean(values)
    assert not np.isnan(image).any()
    height, width = image.shape
    for row in range(height):
        for column in range(width):
            x = 77 + (column + 0.5) / width * 13 * 512
            y = 77 + (row + 0.5) / height * 9 * 512
            assert image[row, column] == int((y - 77) // 512) * 13 + int((x - 77) // 512)
    np.testing.assert_array_equal(image, raster.last(values))


def test_overlapping_patches_are_averaged_and_holes_stay_empty():
    raster = PatchRaster(np.array([[0, 0], [50, 0], [300, 0]]), 100)
    image = raster.mean(np.array([1.0, 3.0, 7.0]))
    row = image[0]
    assert row[0] == 1
    assert row[int(75 / 400 * len(row))] == 2
    assert row[-1] == 7
    assert np.isnan(row[int(220 / 400 * len(row))])
    assert raster.last(np.array([1, 3, 7]))[0][int(75 / 400 * len(row))] == 3


def test_every_patch_shows_even_when_smaller_than_a_pixel():
    coords = np.array([[0, 0], [10_000_000, 10_000_000]])
    image = PatchRaster(coords, 10).mean(np.array([1.0, 2.0]))
    assert max(image.shape) <= 1200
    assert np.nansum(image) == 3


def test_patch_size_comes_from_the_grid_when_not_stated():
    coords = maps().coords
    assert patch_size_of(coords, None, "s") == 256
    assert patch_size_of(coords, float("nan"), "s") == 256
    with pytest.raises(DecoError, match="slide s7: patch size"):
        patch_size_of(coords[:1], None, "s7")


def test_a_page_has_five_titled_panels_and_a_symmetric_contribution_scale():
    figure = heatmap_figure(maps(title="itc"))
    titles = [axes.get_title() for axes in figure.axes[:5]]
    assert titles == ["Tissue layout", "Anchors, 5 present", "Debiased contribution", "Expected retention", "Attention"]
    norm = figure.axes[2].images[-1].norm
    assert norm.vmin == -norm.vmax
    assert figure.axes[3].images[-1].norm.vmax == 1
    figure.canvas.draw()


def test_peaked_attention_leaves_the_other_patches_pale():
    n = 200
    attention = np.where(np.arange(n) % 2, 0.05, 0.01) * 3e-4 / n
    attention[57] = 0.9997
    figure = heatmap_figure(maps(n, attention=attention))
    image = figure.axes[4].images[-1]
    shades = image.cmap(image.norm([0.01, 0.05, 199.9]))[:, :3].mean(1)  # brightness
    assert shades[0] > 0.8
    assert shades[1] > 0.8
    assert shades[2] < 0.1
    assert image.norm.vmax == 1  # the uniform share


def test_a_rare_anchor_with_all_the_evidence_is_the_only_one_in_colour():
    contribution = np.full(200, 2e-3)
    contribution[57] = -1.2  # less than one patch in a hundred
    norm = heatmap_figure(maps(200, contribution=contribution)).axes[2].images[-1].norm
    assert (norm.vmin, norm.vmax) == (-1.2, 1.2)
    norm = heatmap_figure(maps(200, contribution=np.full(200, 1e-7))).axes[2].images[-1].norm
    assert norm.vmax == 1e-3  # the last digit of the tables: what is 0.000 there is white here


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 5e-3, 40.0])
def test_colour_bars_have_plain_numbers_apart_from_each_other(scale):
    figure = heatmap_figure(maps(contribution=scale * np.linspace(-1, 1, 12), attention=np.linspace(1e-9, 1, 12)))
    figure.canvas.draw()
    for axes in figure.axes[5:]:
        assert axes.xaxis.get_offset_text().get_text() == ""
        boxes = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
        shown = sorted((box.x0, box.x1) for box in boxes)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(shown))


def test_long_headings_are_whole():
    title = "Calibrated prediction: adenocarcinoma (58%). Labelled adenocarcinoma (58%). "
    title += "Explained: adenocarcinoma, against its rival HIGH-GRADE DYSPLASIA (31%)."
    figure = heatmap_figure(maps(title=title))
    figure.canvas.draw()
    heading = figure.texts[0]
    assert " ".join(heading.get_text().split()) == f"s1 {title}"
    box = heading.get_window_extent()
    assert box.x1 < figure.bbox.x1
    assert box.y0 > max(axes.title.get_window_extent().y1 for axes in figure.axes[:5])


def test_a_normal_slide_says_why_it_has_no_contributions():
    figure = heatmap_figure(maps(contribution=None, retention=None))
    assert "normal class" in figure.axes[2].texts[0].get_text()


def test_ten_thousand_patches_are_quick(tmp_path):
    n = 10_000
    rng = generator(1, "heatmap test")
    coords = np.stack([np.arange(n) % 125, np.arange(n) // 125], 1) * 512
    slide = SlideMaps("big", coords, rng.integers(0, 64, n), rng.normal(size=n), rng.random(n), rng.random(n), 512.0)
    started = time.process_time()
    write_slide(slide, tmp_path)
    assert time.process_time() - started < 20  # about 2 s; loose, since cores are shared
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".pdf", ".geojson", ".parquet"}


def test_equal_slides_give_equal_files(tmp_path):
    for name in ("a", "b"):
        write_slide(maps(), tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coords": None}, "slide s1 has no patch coordinates"),
        ({"attention": np.ones(3)}, "attention has shape"),
        ({"slide_id": "../evil"}, "slide id"),
        ({"image": "/nowhere/slide.svs"}, "no slide image at"),
        ({"annotation": "/nowhere/a.xml"}, "no annotation at"),
    ],
)
def test_bad_input_is_named(changes, message):
    given = vars(maps()) | changes
    with pytest.raises(DecoError, match=message):
        heatmap_figure(SlideMaps(**given))


def test_anchor_colours_differ():
    colours = anchor_colours(64)
    gaps = np.abs(colours[:, None] - colours[None]).sum(2) + np.eye(64)
    assert gaps.min() > 0.02


def test_thumbnail_ties_pixels_to_level_0(tmp_path):
    Image.new("RGB", (300, 200), "red").save(tmp_path / "t.png")
    assert read_thumbnail(tmp_path / "t.png", (30_000, 20_000)).level0 == (30_000, 20_000)
    assert read_thumbnail(tmp_path / "t.png").level0 == (300, 200)
    figure = heatmap_figure(maps(image=tmp_path / "t.png", level0=(3000, 2000)))
    assert figure.axes[0].images[0].get_extent() == [0, 3000, 2000, 0]


def test_a_picture_that_cannot_be_the_slides_is_refused_with_both_sizes(tmp_path):
    picture = tmp_path / "t.png"
    Image.new("RGB", (222, 297), "red").save(picture)
    with pytest.raises(DecoError, match=r"t\.png has 222 x 297 pixels, the slide 7168 x 6656 at level 0"):
        read_thumbnail(picture, (7168, 6656))
    read_thumbnail(picture, (7168, 9600))  # its shape but for rounding
    with pytest.raises(DecoError, match=r"s1: its patches reach to 2024 x 1768 px .* ends at 222 x 297;.*TRIDENT"):
        heatmap_figure(maps(image=picture))
    with pytest.raises(
        DecoError, match=r"ends at 1000 x 1338; give the slide's own file or a picture of all of it, or"
    ):
        heatmap_figure(maps(image=picture, level0=(1000, 1338)))
    Image.new("RGB", (2000, 1600), "red").save(picture)
    heatmap_figure(maps(image=picture))  # the last patches stick out, as they do where a grid covers the whole slide


def test_a_slide_file_needs_the_extra_or_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken.svs").write_bytes(b"not a slide")
    with pytest.raises(DecoError, match=r"broken\.svs cannot be read"):
        read_thumbnail(tmp_path / "broken.svs")
    real = builtins.__import__

    def without(name, *rest):
        if name == "tiffslide":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DecoError, match=r"deco_ray\[slides\]"):
        read_thumbnail(tmp_path / "broken.svs")


def test_a_slide_without_small_levels_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    tifffile = pytest.importorskip("tifffile")
    path = tmp_path / "flat.tif"
    tifffile.imwrite(path, np.full((256, 512, 3), 200, np.uint8), tile=(64, 64), photometric="rgb")
    assert read_thumbnail(path, longest=100).image.shape == (50, 100, 3)
    assert read_thumbnail(path, (2048, 1024)).level0 == (2048, 1024)  # an export of the slide at a quarter of its size
    with pytest.raises(DecoError, match=r"^\S+flat\.tif has 512 x 256 pixels, the slide 1024 x 2048 at level 0"):
        read_thumbnail(path, (1024, 2048))
    monkeypatch.setattr(thumbnail, "MOST_PIXELS", 512 * 256 - 1)
    with pytest.raises(DecoError, match=r"^\S+flat\.tif: the level fit for a thumbnail has 512 x 256 pixels"):
        read_thumbnail(path, longest=100)


def annotations(tmp_path):
    """The same square with a hole, in every format; a slide of 1000 x 1000."""
    polygon = {"type": "Polygon", "coordinates": [SQUARE, HOLE]}
    feature = {"type": "Feature", "properties": {"a": 1}, "geometry": polygon}
    (tmp_path / "one.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    (tmp_path / "many.json").write_text(json.dumps({"type": "MultiPolygon", "coordinates": [[SQUARE, HOLE]]}))

    def xml(points, group):
        inner = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(points[:-1]))
        return f'<Annotation Name="n" PartOfGroup="{group}"><Coordinates>{inner}</Coordinates></Annotation>'

    body = xml(SQUARE, "_0") + xml(HOLE, "_2")
    (tmp_path / "asap.xml").write_text(f"<ASAP_Annotations><Annotations>{body}</Annotations></ASAP_Annotations>")
    mask = np.zeros((100, 100), dtype=np.uint8)
    mask[10:90, 10:90] = 255
    mask[40:60, 40:60] = 0
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return [tmp_path / name for name in ("one.geojson", "many.json", "asap.xml", "mask.png")]


def test_all_annotation_formats_mark_the_same_patches(tmp_path):
    coords = np.array([(x, y) for x in range(0, 1000, 50) for y in range(0, 1000, 50)])
    centre = coords + 25
    inside = ((centre > 100) & (centre < 900)).all(1) & ~((centre > 400) & (centre < 600)).all(1)
    for path in annotations(tmp_path):
        lesions = read_lesions(path, (1000, 1000))
        assert sorted(lesion.hole for lesion in lesions) == [False, True], path
        np.testing.assert_array_equal(lesion_patches(lesions, coords, 50), inside)
    figure = heatmap_figure(maps(annotation=tmp_path / "asap.xml"))
    assert all(len(axes.lines) == 2 for axes in figure.axes[:5])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "cannot be read as GeoJSON"),
        ("a.json", '{"type": "Nonsense"}', "'Nonsense' is not a GeoJSON type"),
        ("a.json", '{"type": "Polygon", "coordinates": [[[1, "x"]]]}', "not a pair of numbers"),
        ("a.json", '{"type": "Polygon", "coordinates": [[[1, 2], [2, 3]]]}', "three finite points"),
        ("a.json", '{"type": "Polygon", "coordinates": [[[1], [2], [3]]]}', "two coordinates each"),
        ("a.json", '{"type": "Polygon", "coordinates": [[[], [], []]]}', "two coordinates each"),
        ("a.json", '{"type": "Polygon", "coordinates": [[[1, 1' + "0" * 400 + "]]]}", "not a pair of numbers"),
        ("a.json", '{"type": "GeometryCollection", "geometries": [' * 50_000, "cannot be read as GeoJSON"),
        ("a.xml", "<a", "cannot be read as XML"),
        ("a.xml", '<!DOCTYPE a [<!ENTITY b "c">]><a/>', "document type"),
        ("a.xml", "<A><Annotation><Coordinate Order='0' X='1'/>" + "<Coordinate/>" * 3 + "</Annotation></A>", "usable"),
        ("a.png", "x", "cannot be read as an image"),
        ("a.doc", "x", "unknown ending"),
    ],
)
def test_bad_annotations_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DecoError, match=message):
        read_lesions(tmp_path / name, (100, 100))


def test_the_altitude_of_a_point_is_ignored(tmp_path):
    high = [[*point, 77] for point in SQUARE]
    (tmp_path / "a.json").write_text(json.dumps({"type": "Polygon", "coordinates": [high]}))
    np.testing.assert_array_equal(read_lesions(tmp_path / "a.json")[0].points, SQUARE)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_a_document_type_is_refused_in_any_encoding(tmp_path, encoding):
    text = f'<?xml version="1.0" encoding="{encoding[:6]}"?><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'
    (tmp_path / "a.xml").write_bytes((text if encoding != "utf-16-be" else "\ufeff" + text).encode(encoding))
    with pytest.raises(DecoError, match=r"a\.xml cannot be read as XML: it declares a document type"):
        read_lesions(tmp_path / "a.xml")


def test_a_mask_of_countless_specks_is_refused_before_they_are_looked_at(tmp_path, monkeypatch):
    specks = np.zeros((1000, 1000), np.uint8)
    specks[::2, ::2] = 255  # 250,000
    Image.fromarray(specks).save(tmp_path / "a.png")
    monkeypatch.setattr("deco_ray.results.lesions._signed_area", None)
    with pytest.raises(DecoError, match=r"mask .*a\.png has 250,000 separate outlines.*without noise"):
        read_lesions(tmp_path / "a.png", (1000, 1000))


def test_a_mask_needs_the_slide_size(tmp_path):
    annotations(tmp_path)
    with pytest.raises(DecoError, match="unknown size"):
        read_lesions(tmp_path / "mask.png")
