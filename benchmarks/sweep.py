"""Tune's own cost: a sweep of λ on stored judges, two trials side by side, against the same trainings without Ray.

    python benchmarks/sweep.py [--quick]

overhead_s_per_trial   core seconds of the sweep per trial, from its first to its last, less the bare training's
cores_filled           bare training's share of those core seconds
The bare trainings run two at a time as well, each in a plain process: what two trainings on two cores cost each
other is not Tune's.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path

import ray
import torch
from pipeline import bare_training

from deco_ray.config import Config, load_config
from deco_ray.experiments.board import Board
from deco_ray.experiments.session import absolute
from deco_ray.experiments.stages import Stage, TrainStage
from deco_ray.experiments.study import Study
from deco_ray.training.slides import LocalSource

CORES = 2


class Clock(Board):
    """A board that also remembers when trials began and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.begins: list[float] = []
        self.ends: list[float] = []

    def started(self, stage: Stage) -> None:
        super().started(stage)
        self.begins.append(time.perf_counter())

    def finished(self, stage: Stage, seconds: float) -> None:
        super().finished(stage, seconds)
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer values and epochs")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="deco-bench-"))
    scale, epochs, values = (0.03, 10, [0.0, 1.0]) if args.quick else (0.03, 20, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    base = [
        f"cohort={folder}/cohort",
        f"storage={folder}/runs",
        f"synthetic={{preset: panda_lt, scale: {scale}}}",
        "split.name=paper",
        f"training.epochs={epochs}",
        "judge_training.epochs=4",
        "seeds=[0, 1]",
        f"resources.max_concurrent={CORES}",
        "tracking.enabled=false",
    ]
    ray.init(address="local", num_cpus=CORES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        config = absolute(load_config(None, base))
        # judges, tables and λ's default: what a sweep finds
        swept(config, [config.masking.lam])
        study, span = swept(config, [lam for lam in values if lam != config.masking.lam])
        ray.shutdown()
        finals = [run.model for run in study.runs]
        with multiprocessing.get_context("spawn").Pool(CORES) as pool:
            bare = pool.starmap(bare_seconds, [(study, digest) for digest in finals], chunksize=1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    trials, spent = len(finals), CORES * span
    print(f"{trials} trials of {sum(bare) / trials:.1f} s, {epochs} epochs each; the sweep took {span:.1f} s")
    results = {"overhead_s_per_trial": (spent - sum(bare)) / trials, "cores_filled": sum(bare) / spent}
    print(json.dumps({name: round(value, 3) for name, value in results.items()}))


def swept(config: Config, values: list[float]) -> tuple[Study, float]:
    """A study of these λ, and the seconds from the first trial's start to the last one's end."""
    study, clock = Study(config), Clock()
    for lam in values:
        study.add(config.model_copy(update={"masking": config.masking.model_copy(update={"lam": lam})}))
    assert not study.execute(clock)
    return study, max(clock.ends) - min(clock.begins)


def bare_seconds(study: Study, digest: str) -> float:
    torch.set_num_threads(study.base.resources.threads)
    stage = study.graph.stages[digest]
    assert isinstance(stage, TrainStage)
    site = study.sites[stage.site]
    bags = LocalSource({slide: site.cohort.bag(slide).features for slide in site.slide_ids()})
    return bare_training(stage, site.cohort, site.split, site.store, bags)


if __name__ == "__main__":
    main()
