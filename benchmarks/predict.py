"""Predict against a bare forward loop over bags in memory; a heatmap of 10,000 patches; the report of a five-seed run.

    python benchmarks/predict.py [--quick]

Predict runs on Ray Data with one CPU over slides of 4,000 patches on disk and has the same AB-MIL grade them that the
loop applies to the same bags in memory, one thread each. Both take turns; `predict_vs_bare_loop` is the ratio of their
slides a second, medians over the turns. Ray and its worker are up before; the start of each Ray Data execution counts.
`report_s` is a second run of a finished pipeline without its report: everything is found, only the report is built.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("DECO_RAY_PROGRESS", "0")

import numpy as np
import pandas as pd
import ray
import torch

from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.config import load_config
from deco_ray.experiments.board import Board
from deco_ray.experiments.pipeline import run_pipeline
from deco_ray.keys import generator
from deco_ray.models import create_model
from deco_ray.results.ensemble import Ensemble
from deco_ray.results.heatmaps import SlideMaps, write_slide
from deco_ray.results.predict import predict
from deco_ray.results.ungraded import CohortSlides

PATCHES, DIM, CLASSES = 4000, 512, tuple("abcd")
STORED = 24  # slides on disk and in memory; each is graded several times, so that the machine's memory suffices


def write_model(folder: Path) -> Path:
    folder.mkdir()
    facts = {"name": "abmil", "options": {}, "dim": DIM, "classes": CLASSES, "train_counts": [1] * len(CLASSES)}
    (folder / "model.json").write_text(json.dumps(facts))
    torch.manual_seed(0)
    torch.save(create_model("abmil", DIM, len(CLASSES)).state_dict(), folder / "model.pt")
    return folder


def write_cohort(folder: Path, repeats: int) -> Cohort:
    """STORED slides under `repeats` names each."""
    rng = generator("benchmark", "predict")
    with CohortWriter(folder, CohortMeta(name="benchmark", classes=CLASSES, dim=DIM)) as writer:
        for number in range(STORED):
            features = rng.standard_normal((PATCHES, DIM), dtype=np.float32)
            writer.add(SlideFeatures(f"s{number:03d}", f"s{number:03d}", number % 4, features))
    cohort = Cohort.open(str(folder))
    copies = [cohort.slides.assign(slide_id=cohort.slides["slide_id"] + f"_{turn}") for turn in range(repeats)]
    return Cohort(cohort.uri, cohort.meta, pd.concat(copies, ignore_index=True))


def throughput(folder: Path, repeats: int, turns: int) -> tuple[float, float]:
    """Slides a second of predict and of the bare loop."""
    ensemble = Ensemble.load([write_model(folder / "model")])
    cohort = write_cohort(folder / "cohort", repeats)
    ids = list(cohort.slides["slide_id"])
    bags = [cohort.bag(slide).features for slide in ids[:STORED]]
    model = ensemble.members[0].model
    ray.init(address="local", num_cpus=1, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False)
    small = Cohort(cohort.uri, cohort.meta, cohort.slides.head(STORED))
    predict(ensemble, CohortSlides(small), label="")  # starts the worker, fills the page cache
    ours, bare = [], []
    for _ in range(turns):
        begun = time.perf_counter()
        predict(ensemble, CohortSlides(cohort), label="")
        ours.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        with torch.inference_mode():
            for number in range(len(ids)):
                model(bags[number % STORED])
        bare.append(time.perf_counter() - begun)
    ray.shutdown()
    return len(ids) / statistics.median(ours), len(ids) / statistics.median(bare)


def heatmap_seconds(folder: Path, turns: int) -> float:
    """PNG, PDF, GeoJSON and Parquet of one slide of 10,000 patches."""
    rng = generator("benchmark", "heatmap")
    n = 10_000
    coords = np.stack([np.arange(n) % 125, np.arange(n) // 125], 1) * 512
    values = rng.standard_normal(n)
    maps = SlideMaps(
        "slide", coords, rng.integers(0, 64, n), values, rng.random(n), rng.random(n), 512.0, (64_512, 41_472)
    )
    seconds = []
    for _ in range(turns + 1):
        begun = time.perf_counter()
        write_slide(maps, folder)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])  # the first loads fonts


def report_seconds(folder: Path, scale: float, turns: int) -> tuple[float, float]:
    """Seconds and megabytes of the report of a five-seed pipeline on a synthetic cohort."""
    settings = [
        f"cohort={folder}/cohort",
        f"storage={folder}/runs",
        "synthetic.preset=panda_lt",
        f"synthetic.scale={scale}",
    ]
    settings += ["split.name=paper", "training.epochs=1", "judge_training.epochs=1", "tracking.enabled=false"]
    config = load_config(None, settings)
    report = run_pipeline(config, Board()).report
    ray.shutdown()
    seconds = []
    for _ in range(turns):
        shutil.rmtree(report.parent)
        begun = time.perf_counter()
        report = run_pipeline(config, Board()).report
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), report.stat().st_size / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer slides and repeats")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours, bare = throughput(folder, 6 if quick else 16, 1 if quick else 5)
        heatmap = heatmap_seconds(folder / "heatmap", 1 if quick else 5)
        report, size = report_seconds(folder / "pipeline", 0.03 if quick else 0.1, 1 if quick else 3)
    print(f"{'slides of 4,000 patches a second, predict':<48}{ours:>8.1f}")
    print(f"{'the same, bare loop over bags in memory':<48}{bare:>8.1f}")
    print(f"{'seconds for a heatmap of 10,000 patches':<48}{heatmap:>8.2f}")
    print(f"{'seconds for the report of five seeds':<48}{report:>8.2f}")
    print(f"{'its megabytes':<48}{size:>8.2f}")
    result = {"predict_vs_bare_loop": ours / bare, "heatmap_s": heatmap, "report_s": report}
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
