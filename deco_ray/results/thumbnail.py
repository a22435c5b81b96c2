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


@dataclass(frozen=True)
class Thumbnail:
    image: np.ndarray  # uint8 [h, w, 3]
    level0: tuple[int, int]  # width and height of the slide in level-0 pixels


def read_thumbnail(path: str | Path, level0: tuple[int, int] | None = None, longest: int = LONGEST) -> Thumbnail:
    """Thumbnail of a slide file (through tiffslide), or of a PNG or JPEG of the whole slide.

    A plain image does not know its slide's size: give `level0`, else its own pixels count as level 0.
    """
    path = Path(path)
    if not path.is_file():
        raise DecoError(f"no slide image at {path}")
    if path.suffix.lower() in PLAIN_IMAGES:
        image = open_image(path).convert("RGB")
        size = level0 or image.size
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
            if width * height <= MOST_PIXELS:
                return Thumbnail(np.asarray(slide.get_thumbnail((longest, longest)).convert("RGB")), size)
    except Exception as error:  # tiffslide raises whatever its codecs raise
        raise DecoError(f"{path} cannot be read as a slide: {type(error).__name__}: {error}") from error
    raise DecoError(
        f"{path}: the level fit for a thumbnail has {width} x {height} pixels, too many to decode at once; "
        "write it as a pyramid (vips tiffsave --pyramid --tile), or give a PNG or JPEG of the whole slide"
    )


def open_image(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
        image.load()
    except Exception as error:  # damaged images raise anything, a SyntaxError for PNG included
        raise DecoError(f"{path} cannot be read as an image: {error}") from error
    return image
