"""Counterfactual scoring: 64 interventions a slide against forward passes of the judge, and two actors against one.

    python benchmarks/scoring.py [--quick]

One thread, K = 64, d = 512, an AB-MIL judge. All sides of a ratio take turns within one run; a ratio is that of the
medians. `brute_vs_exact_4000` sets the plain way (64 intervened bags, one forward each) against the exact method.
Brute over the plain loop is shown for every other method as a judge too: what it saves is the layers before patches
meet, and the calls of small ones, so that it gains little where mixing the patches is nearly all of a forward.
Actors are compared while all of them work; their start is left out. `data_wait_share` is the part of that run in
which a scorer's judge had nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray
import torch
from torch import Tensor

from deco_ray.anchors import Anchors
from deco_ray.anchors.assignments import write_assignments
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.config import CounterfactualSection
from deco_ray.counterfactual import contributions, slide_scorer
from deco_ray.counterfactual.replacements import Replacements
from deco_ray.counterfactual.scoring import score_slides
from deco_ray.counterfactual.slide_scorer import ScoringJob, Timing
from deco_ray.keys import generator
from deco_ray.models import Aggregator, create_model
from deco_ray.models.registry import REGISTRY

K, DIM, CLASSES = 64, 512, 4
LOG_PRIOR = np.log(np.full(CLASSES, 1 / CLASSES))
SLIDE = 1000  # patches; the actors score by brute force, well over 50 ms a slide


def unit_rows(n: int, *key: str | int) -> Tensor:
    rows = torch.from_numpy(generator("benchmark", *key).standard_normal((n, DIM), dtype=np.float32))
    return rows / rows.norm(dim=1, keepdim=True)


def medians(
    works: Sequence[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of each, all in turns, after one round to warm up."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for times, work in zip(seconds, works):
            begun = clock()
            work()
            if turn:
                times.append(clock() - begun)
    return [statistics.median(times) for times in seconds]


def plain_loop(model: Aggregator, bag: Tensor, assignment: np.ndarray, rows: Tensor) -> Tensor:
    """The obvious way: copy the bag, replace an anchor, run the judge; 64 times."""
    members = torch.from_numpy(assignment)
    logits = []
    with torch.no_grad():
        for k in range(K):
            intervened = bag.clone()
            intervened[members == k] = rows[k]
            logits.append(model(intervened))
    return torch.stack(logits)


def example(method: str, n: int) -> tuple[Aggregator, Tensor, np.ndarray, Tensor]:
    """A judge, a bag, its anchors and the rows that replace them."""
    torch.manual_seed(0)
    model = create_model(method, DIM, CLASSES).eval()
    assignment = np.concatenate([np.arange(K), generator("benchmark", "anchors", n).integers(0, K, n - K)])
    return model, unit_rows(n, "bag", n), assignment, unit_rows(K, "rows")


def brute_gain(method: str, n: int, turns: int) -> float:
    """How many times faster than the plain loop brute is, in CPU time: nothing waits here."""
    model, bag, assignment, rows = example(method, n)
    prepared = Replacements.prepare(model, rows)
    plain, brute = medians(
        [
            lambda: plain_loop(model, bag, assignment, rows),
            lambda: contributions(model, bag, assignment, prepared, LOG_PRIOR, 1, method="brute"),
        ],
        turns,
        time.thread_time,
    )
    return plain / brute


def one_slide(n: int, turns: int, heavy_turns: int) -> dict[str, float]:
    """Seconds of a forward, of exact, of the plain loop and of brute on one bag."""
    model, bag, assignment, rows = example("abmil", n)
    prepared = Replacements.prepare(model, rows)

    def forward() -> None:
        with torch.no_grad():
            model(bag)

    def scored(method: str) -> Callable[[], object]:
        return lambda: contributions(model, bag, assignment, prepared, LOG_PRIOR, 1, method=method)  # type: ignore[arg-type]

    fast = medians([forward, scored("exact")], turns)
    slow = medians([lambda: plain_loop(model, bag, assignment, rows), scored("brute"), scored("exact")], heavy_turns)
    return {"forward": fast[0], "exact": fast[1], "plain": slow[0], "brute": slow[1], "exact_beside": slow[2]}


def write_stage(folder: Path, slides: int) -> ScoringJob:
    """A cohort, anchors and a judge on disk."""
    meta = CohortMeta(name="benchmark", classes=tuple("abcd"), dim=DIM)
    with CohortWriter(folder / "cohort", meta) as writer:
        for index in range(slides):
            features = unit_rows(SLIDE, "slide", index).numpy()
            writer.add(SlideFeatures(f"s{index:04d}", f"s{index:04d}", 1 + index % 3, features))
    cohort = Cohort.open(str(folder / "cohort"))
    found = Anchors.of(unit_rows(K, "anchors").numpy(), unit_rows(32, "normals").numpy())
    (folder / "anchors").mkdir()
    (folder / "judge").mkdir()
    found.save(folder / "anchors")
    bags = (cohort.bag(slide) for slide in cohort.slides["slide_id"])
    assigned = ((bag.slide_id, bag.label, found.assign(bag.features)) for bag in bags)
    write_assignments(folder / "anchors", K, assigned)
    facts = {"name": "abmil", "options": {}, "dim": DIM, "classes": list(cohort.classes)}
    (folder / "judge" / "model.json").write_text(json.dumps(facts))
    torch.save(create_model("abmil", DIM, CLASSES).state_dict(), folder / "judge" / "model.pt")
    section = CounterfactualSection(method="brute")
    anchors, judge, work = (folder / name for name in ("anchors", "judge", "work"))
    return ScoringJob(cohort.uri, cohort.checksum, anchors, judge, section, (1,) * CLASSES, work)


def run_actors(job: ScoringJob, scorers: int, turn: int) -> list[tuple[int, Timing]]:
    timings: list[tuple[int, Timing]] = []
    slides = list(job.cohort.slides["slide_id"])
    fresh = replace(job, work=job.work / f"{scorers}-{turn}")
    score_slides(fresh, slides, scorers=scorers, report=lambda _: None, timings=timings)
    return timings


def rate(timings: list[tuple[int, Timing]]) -> float:
    """Slides a second while all scorers were at work."""
    scorers = {scorer for scorer, _ in timings}
    begin = max(min(t.started for s, t in timings if s == scorer) for scorer in scorers)
    end = min(max(t.ended for s, t in timings if s == scorer) for scorer in scorers)
    slides = 0.0
    for _, timing in timings:
        inside = min(timing.ended, end) - max(timing.started, begin)
        slides += timing.slides * max(0.0, inside) / (timing.ended - timing.started)
    return slides / (end - begin)


def idle_share(timings: list[tuple[int, Timing]]) -> float:
    """The part of the scorers' time in which no judge worked."""
    span = busy = 0.0
    for scorer in {scorer for scorer, _ in timings}:
        own = [timing for number, timing in timings if number == scorer]
        span += max(timing.ended for timing in own) - min(timing.started for timing in own)
        busy += sum(timing.busy for timing in own)
    return 1 - busy / span


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and slides")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    large = one_slide(4000, 10 if quick else 40, 1 if quick else 5)
    small = one_slide(300, 30 if quick else 200, 3 if quick else 15)
    slide_scorer.CHUNK_SLIDES = 1  # so few slides would otherwise be a handful of chunks
    with tempfile.TemporaryDirectory() as folder:
        job = write_stage(Path(folder), 16 if quick else 48)
        ray.init(address="local", num_cpus=2, object_store_memory=300 * 2**20, include_dashboard=False)
        turns = range(1 if quick else 3)
        runs = [(run_actors(job, 1, turn), run_actors(job, 2, turn)) for turn in turns]
        ray.shutdown()
    one = statistics.median(rate(single) for single, _ in runs)
    two = statistics.median(rate(double) for _, double in runs)
    busy = statistics.median(timing.busy / timing.slides for single, _ in runs for _, timing in single)
    wait = statistics.median(idle_share(double) for _, double in runs)
    print(f"{'milliseconds, one thread':<28}{'N=300':>10}{'N=4000':>10}")
    rows = {"forward": "one forward", "exact": "exact", "plain": "64 forwards, plain loop", "brute": "brute"}
    for name, title in rows.items():
        print(f"{title:<28}{small[name] * 1e3:>10.1f}{large[name] * 1e3:>10.1f}")
    gains = [bag["plain"] / bag["brute"] for bag in (small, large)]
    print(f"{'brute over the plain loop':<28}{gains[0]:>9.2f}x{gains[1]:>9.2f}x")
    others = {method: brute_gain(method, 150, 1 if quick else 3) for method in REGISTRY if method != "abmil"}
    print("brute over the plain loop, N=150: " + ", ".join(f"{name} {gain:.2f}x" for name, gain in others.items()))
    print(f"actors, {busy * 1e3:.0f} ms a slide: one {one:.2f} slides/s, two {two:.2f} slides/s")
    result = {
        "exact_vs_forward_4000": large["exact"] / large["forward"],
        "exact_vs_forward_300": small["exact"] / small["forward"],
        "brute_vs_exact_4000": large["plain"] / large["exact_beside"],
        "two_actors_speedup": two / one,
        "data_wait_share": wait,
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
