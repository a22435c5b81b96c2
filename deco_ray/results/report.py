"""One self-contained HTML page per pipeline, sweep, comparison or plan: opens anywhere, needs no network, prints well.

Every string that comes from data passes through the template engine's escaping; the page's own script is pinned by its
hash in a content security policy, so that nothing smuggled in through a slide's name could run.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from PIL import Image, UnidentifiedImageError

from deco_ray.artefacts import write_atomically
from deco_ray.errors import DecoError
from deco_ray.results.canvas import png_bytes
from deco_ray.results.tables import Table, sort_value

TEMPLATES = Path(__file__).with_name("templates")
SIZE_LIMIT = 10 * 2**20  # of the whole page
WIDTHS = (1600, 1200, 900, 640, 420, 280)  # pixels a picture is reduced to, tried in turn until the page fits
SHORT = 24  # characters of a name that never wraps
SCALE = 0.75  # of the page's pixels to a picture's: figures of any size have text as large as the page's
WIDE = 750  # the page's pixels from which a picture takes a row of its own: half a row would make its text too small
JPEG_ABOVE = 400_000  # bytes of PNG: that is a photograph (a slide), which JPEG holds in a tenth


@dataclass(frozen=True)
class Text:
    """Plain paragraphs; an empty line starts a new one."""

    text: str


@dataclass(frozen=True)
class Verdict:
    """What the data support, set apart from everything else."""

    text: str


@dataclass(frozen=True)
class TableBlock:
    table: Table
    bold_best: bool = False


@dataclass(frozen=True)
class Picture:
    """A Figure, the bytes of an image, or the path of one (PNG or JPEG)."""

    image: Figure | bytes | str | Path
    caption: str
    files: Sequence[str] = ()  # names of the files it was also saved as


Block = Text | Verdict | TableBlock | Picture | Table


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block] = field(default_factory=list)


def build_report(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    provenance: Mapping[str, Any],
    config_yaml: str,
    warnings: Sequence[str] = (),
    *,
    subtitle: str = "",
    size_limit: int = SIZE_LIMIT,
) -> Path:
    """Write the page; pictures shrink together until it fits the limit. Returns its path."""
    path = Path(path)
    sources = {
        id(block): _load(block) for section in sections for block in section.blocks if isinstance(block, Picture)
    }
    page = ""
    for width in WIDTHS:
        images = {key: (_data_uri(*source, width), *_shown_size(source[1])) for key, source in sources.items()}
        page = _render(title, subtitle, sections, provenance, config_yaml, warnings, images)
        if len(page.encode()) <= size_limit:
            break
    else:
        raise DecoError(
            f"report {path.name} is {len(page.encode()) / 2**20:.1f} MB even with small pictures "
            f"(limit {size_limit / 2**20:.1f} MB); give it fewer pictures or shorter tables"
        )
    write_atomically(path, page)
    return path


def _render(
    title: str,
    subtitle: str,
    sections: Sequence[Section],
    provenance: Mapping[str, Any],
    config_yaml: str,
    warnings: Sequence[str],
    images: Mapping[int, tuple[str, int, int]],
) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (TEMPLATES / "report.js").read_text()
    style = (TEMPLATES / "report.css").read_text()
    shown = [
        {
            "id": f"section-{number}",
            "title": section.title,
            "blocks": _galleries([_block(block, images) for block in section.blocks]),
        }
        for number, section in enumerate(sections, start=1)
    ]
    return environment.get_template("report.html").render(
        title=title,
        subtitle=subtitle,
        sections=shown,
        provenance=flatten(provenance),
        config_yaml=config_yaml,
        warnings=list(warnings),
        style=Markup(style),  # our own files, not data
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def _block(block: Block, images: Mapping[int, tuple[str, int, int]]) -> dict[str, Any]:
    if isinstance(block, Table):
        block = TableBlock(block)
    if isinstance(block, Text):
        return {"kind": "text", "paragraphs": [part.strip() for part in block.text.split("\n\n") if part.strip()]}
    if isinstance(block, Verdict):
        return {"kind": "verdict", "text": block.text}
    if isinstance(block, Picture):
        uri, width, height = images[id(block)]
        return {
            "kind": "picture",
            "wide": width > WIDE,
            "uri": uri,
            "width": width,
            "height": height,
            "caption": block.caption,
            "files": list(block.files),
        }
    return _table(block)


def _galleries(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring pictures together, so that narrow ones stand side by side on a wide screen."""
    grouped: list[dict[str, Any]] = []
    for block in blocks:
        if block["kind"] != "picture":
            grouped.append(block)
        elif grouped and grouped[-1]["kind"] == "gallery":
            grouped[-1]["pictures"].append(block)
        else:
            grouped.append({"kind": "gallery", "pictures": [block]})
    return grouped


def _spans(table: Table) -> list[tuple[str, int]]:
    """(heading, number of columns) above the heads; empty when no column has a group."""
    spans: list[tuple[str, int]] = []
    for column in table.columns:
        if spans and spans[-1][0] == column.group:
            spans[-1] = (column.group, spans[-1][1] + 1)
        else:
            spans.append((column.group, 1))
    return spans if any(name for name, _ in spans) else []


def _table(block: TableBlock) -> dict[str, Any]:
    table = block.table
    numeric = [table.numeric(column) for column in range(len(table.columns))]
    best = [table.best_rows(column) if block.bold_best else set() for column in range(len(table.columns))]
    # names stay on one line unless one is so long that it would push the numbers off a phone
    longest = [max((len(table.text(row, c)) for row in range(len(table.rows))), default=0) for c in range(len(numeric))]
    kinds = ["number" if number else "short" if length <= SHORT else "long" for number, length in zip(numeric, longest)]
    rows = [
        [
            {
                "text": table.text(row, column),
                "value": sort_value(cell),
                "best": row in best[column],
                "kind": kinds[column],
            }
            for column, cell in enumerate(cells)
        ]
        for row, cells in enumerate(table.rows)
    ]
    return {
        "kind": "table",
        "caption": table.caption,
        "note": table.note,
        "spans": _spans(table),
        "heads": [{"title": column.title, "number": number} for column, number in zip(table.columns, numeric)],
        "rows": rows,
        "latex": table.latex(block.bold_best),
        "csv": table.csv(),
    }


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as (dotted key, text) lines."""
    lines: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines += flatten(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            lines.append((name, ", ".join(map(str, value))))
        else:
            lines.append((name, "–" if value is None else str(value)))
    return lines


def _load(picture: Picture) -> tuple[bytes, Image.Image]:
    """The bytes as given and the picture on white."""
    source = picture.image
    if isinstance(source, Figure):
        data = png_bytes(source)
    elif isinstance(source, bytes):
        data = source
    else:
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise DecoError(f"report picture {source} cannot be read: {error.strerror}") from error
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DecoError(f"report picture {picture.caption!r} is not an image: {error}") from error
    if image.mode in ("RGBA", "LA", "P"):
        # transparent parts would show the page's dark background behind dark text
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return data, image.convert("RGB")


def _shown_size(image: Image.Image) -> tuple[int, int]:
    """Width and height on a page that is wide enough, however far the picture was reduced."""
    return round(SCALE * image.width), round(SCALE * image.height)


def _data_uri(data: bytes, image: Image.Image, width: int) -> str:
    """At most `width` pixels across; a small PNG goes in as it is."""
    if image.width <= width and len(data) <= JPEG_ABOVE and data.startswith(b"\x89PNG"):
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    kind = "png"
    if buffer.tell() > JPEG_ABOVE:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=85)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
