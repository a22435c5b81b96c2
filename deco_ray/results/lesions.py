"""Lesion annotations as outlines in level-0 pixels: GeoJSON, CAMELYON-style (ASAP) XML, or a binary mask image."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib.path import Path as Outline

from deco_ray.errors import DecoError
from deco_ray.results.thumbnail import PLAIN_IMAGES, open_image, read_thumbnail

MASK_SUFFIXES = PLAIN_IMAGES | {".tif", ".tiff"}
# ASAP groups that cut tissue out of a lesion: CAMELYON16's "_2" and "Exclusion", CAMELYON17's "normal"
EXCLUDED_GROUPS = {"_2", "exclusion", "normal"}
MASK_LONGEST = 2048
MOST_OUTLINES = 100_000  # of a mask: specks of 6 x 6 pixels all over it; every patch is compared with every outline


@dataclass(frozen=True)
class Lesion:
    points: np.ndarray  # float [P, 2], level-0 pixels
    hole: bool = False  # tissue inside a lesion that is not lesion


def read_lesions(path: str | Path, level0: tuple[int, int] | None = None) -> list[Lesion]:
    """All outlines of one slide's annotation; a mask image needs the slide's level-0 size."""
    path = Path(path)
    if not path.is_file():
        raise DecoError(f"no annotation at {path}")
    suffix = path.suffix.lower()
    if suffix in (".geojson", ".json"):
        return _read_geojson(path)
    if suffix == ".xml":
        return _read_xml(path)
    if suffix in MASK_SUFFIXES:
        return _read_mask(path, level0)
    known = ", ".join([".geojson", ".json", ".xml", *sorted(MASK_SUFFIXES)])
    raise DecoError(f"annotation {path} has an unknown ending; known are {known}")


def lesion_patches(lesions: Sequence[Lesion], coords: np.ndarray, patch_size: float) -> np.ndarray:
    """True for patches whose centre lies in a lesion, bool [N]."""
    centres = np.asarray(coords, dtype=float) + patch_size / 2
    inside = np.zeros(len(centres), dtype=bool)
    for lesion in lesions:
        if not lesion.hole:
            inside |= Outline(lesion.points).contains_points(centres)
    for lesion in lesions:
        if lesion.hole:
            inside &= ~Outline(lesion.points).contains_points(centres)
    return inside


def _outline(points: Any, path: Path, hole: bool = False) -> Lesion:
    try:
        array = np.asarray([point[:2] for point in points], dtype=float)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:  # JSON has integers of any size
        raise DecoError(f"{path}: an outline holds something that is not a pair of numbers") from error
    if array.shape[1:] != (2,) or len(array) < 3 or not np.isfinite(array).all():
        raise DecoError(f"{path}: an outline needs at least three finite points of two coordinates each")
    return Lesion(array, hole)


def _read_geojson(path: Path) -> list[Lesion]:
    try:
        rings = list(_rings(json.loads(path.read_text(encoding="utf-8")), path))
    except (ValueError, OSError, RecursionError) as error:
        raise DecoError(f"{path} cannot be read as GeoJSON: {error}") from error
    return [_outline(ring, path, hole) for ring, hole in rings]


def _rings(node: Any, path: Path) -> Iterator[tuple[Any, bool]]:
    """(ring, is it a hole) of every polygon; points and lines are no lesions and are passed over."""
    if isinstance(node, list):  # QuPath also writes a bare list of features
        node = {"type": "FeatureCollection", "features": node}
    if not isinstance(node, dict):
        raise DecoError(f"{path}: expected a GeoJSON object, found {type(node).__name__}")
    kind = node.get("type")
    if kind == "FeatureCollection":
        for feature in _list(node.get("features") or [], path):
            yield from _rings(feature, path)
    elif kind == "Feature":
        if node.get("geometry") is not None:
            yield from _rings(node["geometry"], path)
    elif kind == "GeometryCollection":
        for geometry in _list(node.get("geometries") or [], path):
            yield from _rings(geometry, path)
    elif kind in ("Polygon", "MultiPolygon"):
        polygons = node.get("coordinates") or []
        for polygon in [polygons] if kind == "Polygon" else _list(polygons, path):
            for number, ring in enumerate(_list(polygon, path)):
                yield ring, number > 0
    elif kind not in ("Point", "MultiPoint", "LineString", "MultiLineString"):
        raise DecoError(f"{path}: {kind!r} is not a GeoJSON type")


def _list(value: Any, path: Path) -> list:
    if not isinstance(value, list):
        raise DecoError(f"{path}: expected a list in the GeoJSON, found {value!r:.60}")
    return value


class _PlainTree(ElementTree.TreeBuilder):
    """Elements only: the parser tells of a document type in whatever encoding it is written."""

    def doctype(self, *_: str | None) -> None:
        raise ValueError("it declares a document type; annotations need none, and entities can be used to attack")


def _read_xml(path: Path) -> list[Lesion]:
    try:
        root = ElementTree.fromstring(path.read_bytes(), ElementTree.XMLParser(target=_PlainTree()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise DecoError(f"{path} cannot be read as XML: {error}") from error
    lesions = []
    for annotation in root.iter("Annotation"):
        points = sorted(annotation.iter("Coordinate"), key=lambda point: _number(point, "Order", path))
        if len(points) >= 3:  # ASAP also stores dots and rulers
            hole = (annotation.get("PartOfGroup") or "").strip().lower() in EXCLUDED_GROUPS
            lesions.append(_outline([(_number(p, "X", path), _number(p, "Y", path)) for p in points], path, hole))
    return lesions


def _number(point: ElementTree.Element, name: str, path: Path) -> float:
    # some programs write decimal commas
    try:
        return float((point.get(name) or "0" if name == "Order" else point.get(name) or "").replace(",", "."))
    except ValueError:
        raise DecoError(f"{path}: a Coordinate has no usable {name}: {point.attrib}") from None


def _read_mask(path: Path, level0: tuple[int, int] | None) -> list[Lesion]:
    from contourpy import contour_generator

    if path.suffix.lower() in PLAIN_IMAGES:
        image = open_image(path).convert("L")
        size = level0
        image.thumbnail((MASK_LONGEST, MASK_LONGEST))
        mask = np.asarray(image) > 0
    else:
        found = read_thumbnail(path, longest=MASK_LONGEST)
        size, mask = level0 or found.level0, found.image.max(2) > 0
    if size is None:
        raise DecoError(f"mask {path} covers a slide of unknown size; the cohort has no level0_width for it")
    padded = np.pad(mask, 1).astype(float)  # lesions at the border close too
    scale = np.array([size[0] / mask.shape[1], size[1] / mask.shape[0]])
    lines = contour_generator(z=padded).lines(0.5)
    if len(lines) > MOST_OUTLINES:
        raise DecoError(
            f"mask {path} has {len(lines):,} separate outlines, more than the {MOST_OUTLINES:,} that lesions can have; "
            "give a mask that is zero outside the lesions, without noise"
        )
    lesions = []
    for line in lines:
        points = (np.asarray(line) - 0.5) * scale  # pixel centres sit half a pixel in; the padding took one
        if len(points) >= 4:
            lesions.append(Lesion(points, hole=_signed_area(points) < 0))
    return lesions


def _signed_area(points: np.ndarray) -> float:
    x, y = points.T
    return float(0.5 * (x * np.roll(y, -1) - np.roll(x, -1) * y).sum())
