"""Scorers killed in the middle of their work: the table is that of a calm run, bit for bit."""

from __future__ import annotations

import os
import signal

import psutil
from scoring_site import make_site

from deco_ray.config import CounterfactualSection
from deco_ray.counterfactual import slide_scorer
from deco_ray.counterfactual.scoring import score_slides

KILLS = 3


def scorer_processes() -> list[int]:
    """Our own cluster's scorers only: Ray's processes are descendants of this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("SlideScorer" in word for word in process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_three_killed_scorers_lose_no_slide_and_double_none(tiny_cohort, tmp_path, ray_cluster, monkeypatch):
    monkeypatch.setattr(slide_scorer, "CHUNK_SLIDES", 1)
    site = make_site(tiny_cohort, tmp_path, "abmil", hidden=2048)
    section = CounterfactualSection(method="brute")
    killed: list[int] = []

    def kill(progress: dict) -> None:
        if len(killed) < KILLS and progress["slides_scored"] % 3 == 1:
            alive = [pid for pid in scorer_processes() if pid not in killed]
            if alive:
                os.kill(alive[0], signal.SIGKILL)
                killed.append(alive[0])

    job = site.job(tmp_path / "killed", section)
    table = score_slides(job, site.slides, scorers=2, report=kill)
    assert len(killed) == KILLS
    assert table.equals(score_slides(site.job(tmp_path / "calm", section), site.slides, scorers=0))
    pairs = list(zip(table["slide_id"].to_pylist(), table["anchor"].to_pylist()))
    assert len(pairs) == len(set(pairs))
    assert {slide for slide, _ in pairs} == set(site.slides)
