"""Part of `make chaos`: 1,000 slides scored and 200 tiny trainings in one process; memory must stay flat.

    python tests/faults/soak.py [--slides 1000] [--trainings 200]

The last line is one JSON object: resident memory after the first tenth and at the end of each part, in MB.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import write_tiny_cohort
from pipeline_site import InMemory, tiny_config
from scoring_site import make_site

from deco_ray.config import CounterfactualSection, with_settings
from deco_ray.counterfactual.scoring import score_slides
from deco_ray.experiments.schedule import Workplace, make
from deco_ray.experiments.study import Study
from deco_ray.progress import track

LIMIT = 0.10  # growth allowed after the first tenth


def resident_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def score(root: Path, slides: int) -> list[float]:
    cohort = write_tiny_cohort(root / "many", slides=(12, slides, 12))
    site = make_site(cohort, root / "scoring", "abmil")
    readings: list[float] = []
    # in this process, as a trial with one scorer does
    job = site.job(root / "scores", CounterfactualSection())
    score_slides(job, site.slides, scorers=0, report=lambda progress: readings.append(resident_mb()))
    return readings


def train(root: Path, trainings: int) -> list[float]:
    cohort = write_tiny_cohort(root / "few")
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # it announces every training in this process
    readings = []
    for seed in track(range(trainings), label="train", unit="training"):
        config = with_settings(tiny_config(cohort.uri, root / "runs"), {"method": "abmil", "seeds": [seed]})
        study = Study(config)
        study.add(config)
        place = Workplace(study.graph.stages, study.sites, {cohort.checksum: InMemory(cohort)}, config.resources)
        for stage in study.graph:
            make(stage, place, lambda metrics: None)
        readings.append(resident_mb())
    return readings


def growth(readings: list[float]) -> float:
    """Largest later reading over the one after the first tenth, minus one."""
    start = readings[len(readings) // 10]
    return max(readings[len(readings) // 10 :]) / start - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slides", type=int, default=1000)
    parser.add_argument("--trainings", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts = {"scoring": score(Path(folder), args.slides), "training": train(Path(folder), args.trainings)}
    told = {}
    for name, readings in parts.items():
        told[f"{name}_start_mb"] = round(readings[len(readings) // 10], 1)
        told[f"{name}_end_mb"] = round(readings[-1], 1)
        told[f"{name}_growth"] = round(growth(readings), 4)
    print(json.dumps(told))
    return int(any(growth(readings) > LIMIT for readings in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
