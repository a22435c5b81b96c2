"""SIGKILL a training process again and again: it ends with the weights of a calm run, bit for bit."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from deco_ray.artefacts import ArtefactStore
from deco_ray.keys import generator

KILLS = 5
CHILD = """
import sys
from dataclasses import dataclass

from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort import Cohort
from deco_ray.cohort.splits import make_split
from deco_ray.config import ModelSection, ResourceSection, SplitSection, TrainingSection
from deco_ray.training.runner import run_training
from deco_ray.training.slides import LocalSource
from deco_ray.training.spec import RunSpec
from pathlib import Path

cohort, root = Cohort.open(sys.argv[1]), Path(sys.argv[2])
split = make_split(cohort, SplitSection(val_per_class=2, test_per_class=2))


class Handle:
    def open(self):
        return LocalSource.read(cohort, cohort.slides["slide_id"])


spec = RunSpec(
    cohort=cohort.checksum,
    split=split.digest,
    model=ModelSection(options={"hidden": 64, "dropout": 0.2}),
    training=TrainingSection(epochs=12, lr=5e-3, schedule="cosine", retrain_classifier_epochs=3),
)
say = lambda row: print("epoch", row["epoch"], flush=True)
folder = run_training(spec, cohort, split, ArtefactStore(root), ResourceSection(), Handle(), report=say)
print("done", spec.digest, flush=True)
"""


def start(cohort, root):
    command = [sys.executable, "-c", CHILD, cohort.uri, str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process):
    """Lets a run end; the digest it printed last."""
    lines = process.stdout.read().split("\n")
    assert process.wait() == 0
    return next(line.split()[1] for line in lines if line.startswith("done"))


@pytest.mark.timeout(600)
def test_weights_survive_sigkill_at_random_points(tiny_cohort, tmp_path):
    digest = finish(start(tiny_cohort, tmp_path / "calm"))
    rng = generator("kill points")
    killed = 0
    for _ in range(KILLS):
        process = start(tiny_cohort, tmp_path / "killed")
        epochs = int(rng.integers(1, 4))  # fewer than the run has left, five times over
        for line in process.stdout:
            epochs -= line.startswith("epoch")
            if not epochs:
                break
        time.sleep(rng.uniform(0, 0.04))  # somewhere in the next epoch, its validation or its checkpoint
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 4
    assert finish(start(tiny_cohort, tmp_path / "killed")) == digest
    calm, after = (ArtefactStore(tmp_path / name).path("model", digest) for name in ("calm", "killed"))
    left, right = (torch.load(folder / "model.pt", weights_only=True) for folder in (calm, after))
    for name in left:
        assert torch.equal(left[name], right[name]), name
    assert json.loads((after / "metrics.json").read_text())["resumes"] >= killed - 1
    assert (calm / "predictions.parquet").read_bytes() == (after / "predictions.parquet").read_bytes()
    assert not list((tmp_path / "killed" / "work").iterdir())
