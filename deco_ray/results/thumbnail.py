"""A small picture of a whole slide, with the scale that ties it to level-0 coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from deco_ray.errors import DecoError

LONGEST = 1600  # pixels: sharper than any panel of a heatmap page
MOST_PIXELS = 2**28  # of the level a thumbnail is made from: decoded whole, three bytes each and more than once
PLAIN_IMAGES = {".png", ".jpg", ".jpeg"}
SHAPE_TOLERANCE = (
    0.02  # between a picture's shape and its slide's, besides a pixel's rounding: levels are padded a little
)


@dataclass(frozen=True)
class Thumbnail:
    image: np.ndarray  # uint8 [h, w, 3]
    level0: tuple[int, int]  # width and height of the slide in level-0 pixels


def read_thumbnail(path: str | Path, level0: tuple[int, int] | None = None, longest: int = LONGEST) -> Thumbnail:
    """Thumbnail of a slide file (through tiffslide), or of a PNG or JPEG of the whole slide.

    A plain image does not know its slide's size: give `level0`, else its own pixels count as level 0. A picture of
    another shape than `level0` is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise DecoError(f"no slide image at {path}")
    if path.suffix.lower() in PLAIN_IMAGES:
        image = open_image(path).convert("RGB")
        size = _level0(path, image.size, level0)
        image.thumbnail((longest, longest))
        return Thumbnail(np.asarray(image), size)
    try:
        import tiffslide
    except ImportError:
        raise DecoError(
            f"reading {path.name} needs tiffslide: pip install 'deco_ray[slides]', or draw without the image"
        ) from None
    try:
        with tiffslide.TiffSlide(path) as slide:
            size = slide.dimensions
            # the level tiffslide's own thumbnail reads
            width, height = slide.level_dimensions[slide.get_best_level_for_downsample(max(size) / longest)]
            fits = width * height <= MOST_PIXELS
            picture = np.asarray(slide.get_thumbnail((longest, longest)).convert("RGB")) if fits else None
    except Exception as error:  # tiffslide raises whatever its codecs raise
        raise DecoError(f"{path} cannot be read as a slide: {type(error).__name__}: {error}") from error
    if picture is None:
        raise DecoError(
            f"{path}: the level fit for a thumbnail has {width} x {height} pixels, too many to decode at once; "
            "write it as a pyramid (vips tiffsave --pyramid --tile), or give a PNG or JPEG of the whole slide"
        )
    return Thumbnail(picture, _level0(path, size, level0))


def _level0(path: Path, size: tuple[int, int], level0: tuple[int, int] | None) -> tuple[int, int]:
    """The slide's size as stated, if a picture of `size` can show all of it; the picture's own where none is stated."""
    if level0 is None:
        return size
    (width, height), (slide_width, slide_height) = size, level0
    if abs(width * slide_height / (height * slide_width) - 1) > SHAPE_TOLERANCE + 1 / min(size):
        raise DecoError(
            f"{path} has {width} x {height} pixels, the slide {slide_width} x {slide_height} at level 0: a picture of "
            "the whole slide has the slide's shape; give the slide's own file or picture, or draw without it"
        )
    return level0


def open_image(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
        image.load()
    except Exception as error:  # damaged images raise anything, a SyntaxError for PNG included
        raise DecoError(f"{path} cannot be read as an image: {error}") from error
    return image
