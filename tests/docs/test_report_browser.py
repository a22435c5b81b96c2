"""The report in a real browser: it sorts, copies, links, fits a phone, follows light and dark, and fetches nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deco_ray.results.canvas import new_figure
from deco_ray.results.report import Picture, Section, Verdict, build_report
from deco_ray.results.tables import Column, Estimate, Table

sys.path.insert(0, str(Path(__file__).parent))
from chromium import browser, find_chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine: apt-get install chromium"),
]

TABLE = Table(
    (Column("Method"), Column("F1", group="ours"), Column("A rather long heading", group="paper"), Column("Reading")),
    [
        ["m10", Estimate(9.5, 1.0), 1.0, "x"],
        ["m2", Estimate(60.25, 2.0), None, "<b>y</b>"],
        ["m1", Estimate(-3.0), 2.0, "z"],
        ["m3", None, 3.0, "w"],
    ],
    "Scores",
    "note",
)
ORDER = "Array.from(document.querySelectorAll('tbody')[0].rows).map(r => r.cells[0].textContent)"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    figure, (axes,) = new_figure(7, 3)
    axes.plot([1, 2])
    wide = Table(tuple(Column(f"column {i}") for i in range(20)), [[float(i) for i in range(20)]], "Wide")
    sections = [
        Section(
            "Results", [Verdict("plain words " * 20), TABLE, Picture(figure, "<script>window.hacked = 1</script>")]
        ),
        Section("Other", [wide]),
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    build_report(path, "A report", sections, {"key": "v" * 300}, "a: 1\n" * 50, ["<script>window.hacked = 1</script>"])
    return path.as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(find_chromium(), tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


def test_sorting_by_number_and_by_name_with_missing_values_last(page, report):
    page.open(report)
    assert page.js(ORDER) == ["m10", "m2", "m1", "m3"]
    second = ".heads th:nth-child(2) .sort"
    page.click(second)
    assert page.js(ORDER) == ["m2", "m10", "m1", "m3"]
    assert page.js("document.querySelector('.heads th:nth-child(2)').getAttribute('aria-sort')") == "descending"
    page.click(second)
    assert page.js(ORDER) == ["m1", "m10", "m2", "m3"]
    page.click(".heads th:nth-child(1) .sort")
    assert page.js(ORDER) == ["m1", "m2", "m3", "m10"]
    assert page.js("document.querySelectorAll('th[aria-sort]').length") == 1


def test_copy_puts_latex_on_the_clipboard(page, report):
    page.open(report)
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    for what, expected in (("latex", TABLE.latex()), ("csv", TABLE.csv())):
        page.click(f"button.copy[data-what={what}]")
        page.wait("document.getElementById('status').textContent.startsWith('Table copied')")
        page.call("Page.bringToFront")
        assert page.js("navigator.clipboard.readText()") == expected
        page.js("document.getElementById('status').textContent = ''")


def test_every_link_of_the_contents_scrolls_to_its_section(page, report):
    page.open(report)
    targets = page.js("Array.from(document.querySelectorAll('nav a')).map(a => a.getAttribute('href'))")
    assert targets == ["#warnings", "#section-1", "#section-2", "#configuration", "#provenance"]
    for target in targets:
        page.click(f'nav a[href="{target}"]')
        page.wait(f"location.hash === '{target}'")
        page.wait(
            f"(r => r.top < innerHeight && r.bottom > 0)(document.querySelector('{target}').getBoundingClientRect())"
        )


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways_but_wide_tables_do(page, report, width):
    page.open(report, width=width, height=800)
    assert page.js("document.documentElement.scrollWidth") <= width
    box = "document.querySelectorAll('.scroll')[1]"
    assert page.js(f"{box}.scrollWidth > {box}.clientWidth")
    assert page.js(
        "Array.from(document.images).every(i => i.naturalWidth > 0 && i.getBoundingClientRect().width > 100)"
    )


def test_light_and_dark_follow_the_system(page, report):
    brightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    page.open(report)
    assert min(page.js(brightness)) > 200
    page.open(report, dark=True)
    assert max(page.js(brightness)) < 60


def test_printing_opens_what_is_folded_and_closes_it_again(page, report):
    page.open(report)
    page.js("window.dispatchEvent(new Event('beforeprint'))")
    assert page.js("document.querySelector('details').open")
    page.js("window.dispatchEvent(new Event('afterprint'))")
    assert not page.js("document.querySelector('details').open")
    assert len(page.call("Page.printToPDF")["data"]) > 10_000


def test_nothing_runs_from_data_and_nothing_is_fetched(page, report):
    page.open(report)
    assert page.js("window.hacked") is None
    fetched = page.js("performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in fetched if not name.startswith("data:")] == []
