"""The HTML report as text: self-contained, escaped, within its size; what a browser does with it is tested in docs."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from deco_ray.errors import DecoError
from deco_ray.results.canvas import new_figure
from deco_ray.results.report import Picture, Section, TableBlock, Text, Verdict, build_report, flatten
from deco_ray.results.tables import Column, Estimate, Table

HOSTILE = "<script>alert('x')</script>\"'&<img src=x onerror=alert(1)></textarea></style>"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Reader(HTMLParser):
    """Collects elements, their attributes and text; checks that elements nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def noise(width, height) -> bytes:
    """A picture that does not compress."""
    pixels = np.random.Generator(np.random.Philox(1)).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table(text="a") -> Table:
    columns = (Column("Name"), Column("F1", best="high", group="ours"), Column(text, group="paper"))
    return Table(columns, [[text, Estimate(2.0, 0.5), 1.0], ["b", Estimate(10.0), None]], text, text)


def page(tmp_path, text=HOSTILE, picture=None, **options) -> str:
    figure, (axes,) = new_figure(3, 2)
    axes.plot([1, 2])
    blocks = [
        Text(f"{text}\n\nsecond"),
        Verdict(text),
        table(text),
        TableBlock(table(text), bold_best=True),
        Picture(picture or figure, text, [text]),
    ]
    build_report(
        tmp_path / "r.html",
        text,
        [Section(text, blocks), Section("Two")],
        {text: text, "nested": {"list": [1, text], "none": None}},
        f"name: {text}\n",
        [text],
        subtitle=text,
        **options,
    )
    return (tmp_path / "r.html").read_text()


def test_hostile_text_stays_text_everywhere(tmp_path):
    found = Reader(page(tmp_path))
    assert len(found.named("script")) == 1
    assert len(found.named("img")) == 1
    assert all("onerror" not in attributes for _, attributes in found.elements)
    assert HOSTILE in "".join(found.text["title"])
    for tag in ("h1", "h2", "h3", "td", "pre", "dd", "dt", "li"):
        assert any(HOSTILE in part for part in "".join(found.text[tag]).split("\n")), tag
    assert sum(HOSTILE in (attributes.get("alt") or "") for attributes in found.named("img")) == 1


def test_nothing_is_fetched_from_anywhere(tmp_path):
    text = page(tmp_path)
    found = Reader(text)
    for tag, attributes in found.elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/")), (tag, value)
        assert "style" not in attributes, "the policy forbids inline style attributes"
        assert not any(name.startswith("on") for name in attributes), tag
    assert not found.named("link")
    style = "".join(found.text["style"])
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"https?://", "".join(found.text["script"]) + style)


def test_policy_allows_exactly_our_script_and_style(tmp_path):
    found = Reader(page(tmp_path))
    policy = next(a["content"] for a in found.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256("".join(found.text[tag]).encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_links_of_the_contents_lead_somewhere(tmp_path):
    found = Reader(page(tmp_path))
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in found.named("a")]
    assert len(links) == 6  # content, warnings, two sections, configuration, provenance
    assert all(link[1:] in ids for link in links)


def test_tables_carry_values_for_sorting_and_sources_for_copying(tmp_path):
    found = Reader(page(tmp_path, text="a"))
    values = [a.get("data-value") for a in found.named("td")]
    assert values[:6] == [None, "2.0", "1.0", None, "10.0", None]
    sources = "".join(found.text["textarea"])
    assert table().latex() in sources
    assert table().csv() in sources
    bold = [a for a in found.named("td") if "best" in (a.get("class") or "")]
    assert [a["data-value"] for a in bold] == ["10.0"]  # only where asked
    assert [a["colspan"] for a in found.named("th") if "colspan" in a][:3] == ["1", "1", "1"]


def test_pictures_shrink_until_the_page_fits(tmp_path):
    big = noise(1050, 700)
    text = page(tmp_path, picture=big, size_limit=300_000)
    assert len(text.encode()) <= 300_000
    (picture,) = Reader(text).named("img")
    kind, data = re.fullmatch(r"data:image/(png|jpeg);base64,(.*)", picture["src"]).groups()
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.format.lower() == kind
        assert (picture["width"], picture["height"]) == ("788", "525")  # shown as large as it would be unreduced
        assert image.width < 1050
        assert image.width / image.height == pytest.approx(1.5, abs=0.01)
    with pytest.raises(DecoError, match="fewer pictures"):
        page(tmp_path, picture=big, size_limit=20_000)


def test_every_figure_is_shown_at_one_scale_and_large_ones_have_a_row_to_themselves(tmp_path):
    inches = [(3.4, 2.5), (7, 2.3), (3.4, 1.9), (11, 8)]
    pictures = [Picture(new_figure(*size)[0], str(size)) for size in inches]
    alone = Section("Alone", [Picture(new_figure(3.4, 2)[0], "alone")])
    build_report(tmp_path / "r.html", "t", [Section("Side by side", pictures), alone], {}, "")
    found = Reader((tmp_path / "r.html").read_text())
    assert [int(image["width"]) for image in found.named("img")] == [510, 1050, 510, 1650, 510]
    assert [figure.get("class") for figure in found.named("figure")] == [None, "wide", None, "wide", "wide"]


def test_small_pngs_are_embedded_untouched_and_transparency_is_put_on_white(tmp_path):
    small = noise(20, 10)
    assert base64.b64encode(small).decode() in page(tmp_path, picture=small)
    Image.new("RGBA", (3000, 10), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    (picture,) = Reader(page(tmp_path, picture=tmp_path / "clear.png")).named("img")
    with Image.open(io.BytesIO(base64.b64decode(picture["src"].partition(",")[2]))) as image:
        assert image.getpixel((5, 2)) == (255, 255, 255)


@pytest.mark.parametrize("picture", [b"not a picture", "/nowhere/x.png"])
def test_bad_pictures_are_named(tmp_path, picture):
    with pytest.raises(DecoError, match="report picture"):
        page(tmp_path, picture=picture)


def test_equal_reports_are_equal_files(tmp_path):
    assert page(tmp_path) == page(tmp_path)


def test_flatten():
    assert flatten({"a": {"b": [1, 2], "c": None}, "d": 3}) == [("a.b", "1, 2"), ("a.c", "–"), ("d", "3")]
