"""Orchestration: a pipeline's wall time against its stages' bare compute, and what a second submit costs.

overhead_ratio    (wall time with two runs side by side − 60 s) / (sum of the stages' compute in a plain process / 2)
second_submit_s   the same command again, in a fresh process, everything reused
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from deco_ray.anchors import Anchors, load_assignments
from deco_ray.artefacts import ArtefactStore
from deco_ray.config import load_config
from deco_ray.counterfactual.table import slide_ratios
from deco_ray.experiments.methods import expand
from deco_ray.experiments.session import absolute
from deco_ray.experiments.site import open_site
from deco_ray.experiments.stages import TrainStage
from deco_ray.keys import torch_seed
from deco_ray.models import create_model
from deco_ray.training.loop import train
from deco_ray.training.slides import LocalSource, run_slides

JOB = Path(__file__).parents[1] / "jobs" / "full_pipeline.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer slides, seeds and epochs")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="deco-bench-"))
    scale, epochs, seeds = (0.03, 6, [0, 1]) if args.quick else (0.06, 30, [0, 1, 2, 3])
    overrides = [
        f"cohort={folder}/cohort",
        f"storage={folder}/runs",
        f"synthetic={{preset: panda_lt, scale: {scale}}}",
        "split.name=paper",
        f"training.epochs={epochs}",
        f"judge_training.epochs={epochs}",
        f"seeds={seeds}",
        "resources.max_concurrent=2",
        "report.heatmaps=0",
    ]
    command = [sys.executable, str(JOB), *(word for item in overrides for word in ("--set", item))]
    open_site(absolute(load_config(None, overrides)))  # the cohort is data, not orchestration
    try:
        wall = timed(command)
        second = timed(command)
        compute = bare_compute(overrides)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'first run, wall':<40}{wall:8.1f} s")
    print(f"{'its trainings in a plain process':<40}{compute:8.1f} s")
    print(f"{'second run, wall':<40}{second:8.1f} s")
    ratio = max(0.0, wall - 60) / (compute / 2)
    print(json.dumps({"overhead_ratio": round(ratio, 3), "second_submit_s": round(second, 2)}))


def timed(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def bare_compute(overrides: list[str]) -> float:
    """Seconds of every training of the pipeline, one after another, without Ray: same specs, same data, no report."""
    config = absolute(load_config(None, overrides))
    site = open_site(config)
    bags = {slide: site.cohort.bag(slide).features for slide in site.slide_ids()}
    torch.set_num_threads(config.resources.threads)
    _, stages = expand(config, site.cohort, site.split)
    total = 0.0
    for stage in stages:
        if isinstance(stage, TrainStage):
            total += bare_training(stage, site.cohort, site.split, site.store, LocalSource(bags))
    return total


def bare_training(stage: TrainStage, cohort, split, store: ArtefactStore, source: LocalSource) -> float:
    spec = stage.spec
    slides = run_slides(cohort, split)
    if spec.deco is not None:
        anchors = store.path("anchors", spec.deco.anchors)
        labels = {slide: slides.labels[slide] for slide in slides.train}
        table = store.path("contributions", spec.deco.contributions)
        k = Anchors.load(anchors).k
        ratios = slide_ratios(table, labels, cohort.meta.normal_class, spec.deco.masking, spec.seed, k)
        slides = run_slides(cohort, split, load_assignments(anchors), ratios)
    torch.manual_seed(torch_seed(*spec.key("init", spec.model.name)))
    model = create_model(spec.model.name, cohort.dim, slides.classes, **spec.model.options)
    started = time.perf_counter()
    train(model, spec, slides, source)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
