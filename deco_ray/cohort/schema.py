"""The cohort format: cohort.json, slides.parquet, patches/, splits/ (the contract, in one place)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from deco_ray.errors import CohortError

FORMAT_VERSION = 1
MOST_DIMENSIONS = 2**16  # of a feature; encoders have hundreds to thousands
UNLABELLED = -1  # label of a slide nobody has graded: prediction only

SLIDES = pa.schema(
    [
        ("slide_id", pa.string()),
        ("case_id", pa.string()),
        ("label", pa.int32()),
        ("n_patches", pa.int64()),
        ("part", pa.int32()),
        ("row_group", pa.int32()),
        ("patch_size_level0", pa.float64()),  # null where the source does not say
        ("level0_width", pa.int64()),
        ("level0_height", pa.int64()),
        ("checksum", pa.string()),  # of the slide's features and coordinates as stored
    ]
)
SPLIT_NAMES = ("train", "val", "test", "unused")
SPLIT = pa.schema([("slide_id", pa.string()), ("split", pa.string())])


class CohortMeta(BaseModel):
    """cohort.json."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    classes: tuple[str, ...]
    normal_class: int = 0
    dim: int
    dtype: str = "float32"  # float32 or float16, little-endian
    encoder: str | None = None
    patch_size: int | None = None  # pixels at the magnification of the encoder
    magnification: float | None = None
    format_version: int = FORMAT_VERSION
    checksum: str = ""  # of all slides: identifies the data to every digest


def parse_meta(text: str | bytes, where: str) -> CohortMeta:
    try:
        meta = CohortMeta.model_validate(json.loads(text))
    except (ValueError, ValidationError, RecursionError) as error:
        raise CohortError(f"{where}/cohort.json is damaged: {error}; ingest the cohort again") from error
    if meta.format_version != FORMAT_VERSION:
        raise CohortError(f"{where} has cohort format {meta.format_version}; this release reads {FORMAT_VERSION}")
    if meta.dtype not in ("float32", "float16"):
        raise CohortError(f"{where}/cohort.json: dtype {meta.dtype!r} is neither float32 nor float16")
    if not 1 <= meta.dim <= MOST_DIMENSIONS:
        raise CohortError(f"{where}/cohort.json: dim {meta.dim} is not between 1 and {MOST_DIMENSIONS}")
    if meta.classes and not 0 <= meta.normal_class < len(meta.classes):
        raise CohortError(
            f"{where}/cohort.json: normal_class {meta.normal_class} is none of its {len(meta.classes)} classes, "
            "which count from 0"
        )
    return meta


def patch_schema(dim: int, dtype: str) -> pa.Schema:
    width = dim * np.dtype(dtype).itemsize
    # x, y: top-left corner in level-0 pixels; null where the source has no coordinates
    return pa.schema([("slide_id", pa.string()), ("x", pa.int32()), ("y", pa.int32()), ("feature", pa.binary(width))])


def part_name(part: int) -> str:
    return f"patches/part-{part:05d}.parquet"


def check_slide_id(slide_id: Any) -> str:
    """Slide ids name files and folders later, so they must not leave them."""
    text = str(slide_id)
    if (
        not text.strip()
        or "/" in text
        or "\\" in text
        or ".." in text
        or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in text)  # surrogates: bytes that are no UTF-8
        or len(text) > 200
    ):
        raise CohortError(
            f"slide id {text!r} is empty, over 200 characters, or holds a path separator, '..', a control character "
            "or bytes that are not UTF-8; rename the slide"
        )
    return text
