"""MLflow's pages in a real browser: what a reader sees after a run, not what we believe we logged."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from chromium import Browser, browser, find_chromium
from fabricated_run import write_run_artefact
from servers import running

from deco_ray.config import TrackingSection
from deco_ray.experiments.demo_command import free_port
from deco_ray.results.figures import confusion_figure
from deco_ray.results.tracking import Tracker
from deco_ray.results.ui import server_command

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine: apt-get install chromium"),
]
EXPAND = (  # the small plus before the parent's name, where it is drawn already
    "Array.from(document.querySelectorAll('[role=gridcell]'))"
    ".find(cell => cell.textContent.includes('demo pipeline'))?.querySelector('button')?.click()"
)
TEXT = "document.body.innerText"


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, tiny_cohort) -> tuple[Path, str, str, list[str]]:
    """A storage folder with one pipeline of two seeds: (folder, experiment id, parent, children)."""
    storage = tmp_path_factory.mktemp("storage")
    tracker = Tracker.open(TrackingSection(), storage, tiny_cohort)
    parent = tracker.parent("demo pipeline", "pipeline", "d0", {"anchors.k": 64})
    children = [tracker.child(parent, f"final seed {seed}", f"c{seed}", {"seed": seed}) for seed in (0, 1)]
    for seed, child in enumerate(children):
        child.log_run_artefact(write_run_artefact(storage / f"run{seed}", seed, epochs=12))
    parent.log_metrics({"deco/macro_f1": 0.61, "deco/macro_f1_std": 0.02})
    parent.log_table(pd.DataFrame({"method": ["judge", "deco"], "macro-F1": ["0.52 ± 0.03", "0.61 ± 0.02"]}), "summary")
    parent.log_figure(confusion_figure(np.array([[9, 1], [2, 8]]), ["normal", "lesion"]), "confusion_all")
    parent.describe("Report: `report.html`")
    parent.finish()
    return storage, tracker.experiment_id, str(parent.run_id), [str(child.run_id) for child in children]


@pytest.fixture(scope="module")
def site(tracked) -> str:
    storage, experiment, *_ = tracked
    port = free_port()
    with running(server_command(storage, port=port), f"http://127.0.0.1:{port}/health", storage / "server.log"):
        yield f"http://127.0.0.1:{port}/#/experiments/{experiment}"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Browser:
    with browser(str(find_chromium()), tmp_path_factory.mktemp("chromium") / "profile") as opened:
        yield opened


def see(page: Browser, address: str, expression: str, height: int = 1200) -> None:
    """Open an address and wait, however busy the machine, until the expression holds."""
    page.open("about:blank")
    page.open(address, 1500, height)
    patiently(page, expression)


def patiently(page: Browser, expression: str) -> None:
    deadline = time.monotonic() + 200
    while not page.js(expression):
        assert time.monotonic() < deadline, f"never true: {expression}; the page says {page.js(TEXT)[-1500:]}"
        time.sleep(0.2)


def unfold(page: Browser, expression: str) -> None:
    """Press the plus until it shows: a page that is being drawn loses a press."""
    for _ in range(20):
        page.js(EXPAND)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if page.js(expression):
                return
            time.sleep(0.2)
    raise AssertionError(f"never true: {expression}; the page says {page.js(TEXT)[-1500:]}")


def shows(text: str) -> str:
    return f"{TEXT}.includes({json.dumps(text)})"


def keep_picture(page: Browser, path: Path) -> None:
    path.write_bytes(base64.b64decode(page.call("Page.captureScreenshot")["data"]))


def test_a_parent_is_listed_and_unfolds_into_its_children(page, site, tmp_path):
    see(page, f"{site}/runs", shows("demo pipeline"))
    assert not page.js(shows("final seed 0"))
    unfold(page, f"{shows('final seed 0')} && {shows('final seed 1')}")
    keep_picture(page, tmp_path / "runs.png")


def test_a_parent_shows_its_results_and_its_children(page, site, tracked, tmp_path):
    see(page, f"{site}/runs/{tracked[2]}", shows("deco/macro_f1_std"))
    for text in ("final seed 0", "final seed 1", "report.html", "0.61", "tiny"):
        patiently(page, shows(text))
    keep_picture(page, tmp_path / "parent.png")


def test_a_child_shows_its_curves_first(page, site, tracked, tmp_path):
    lines = "document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line').length"
    see(page, f"{site}/runs/{tracked[3][0]}/model-metrics", f"{lines} >= 3")
    patiently(page, shows("train_loss"))
    assert page.js("document.querySelector('.js-plotly-plot').querySelector('path.js-line') !== null")
    keep_picture(page, tmp_path / "curves.png")


def test_figures_are_pictures_and_tables_are_tables(page, site, tracked, tmp_path):
    picture = "Array.from(document.images).some(image => image.src.startsWith('blob:') && image.naturalWidth > 300)"
    _, _, parent, children = tracked
    for run, figure in ((parent, "confusion_all"), (children[0], "confusion_test")):
        see(page, f"{site}/runs/{run}/artifacts/figures/{figure}.png", picture)
        patiently(page, shows(f"{figure}.png"))
    keep_picture(page, tmp_path / "figure.png")
    see(page, f"{site}/runs/{children[0]}/artifacts/tables/predictions.csv", shows("slide_id"))
    patiently(page, "document.querySelectorAll('table, [role=table], [role=grid]').length > 0")
    keep_picture(page, tmp_path / "table.png")


def test_a_child_offers_its_model(page, site, tracked):
    see(page, f"{site}/runs/{tracked[3][0]}", shows("Logged models"))
    patiently(page, "Array.from(document.querySelectorAll('a')).some(link => link.href.includes('/models/m-'))")
