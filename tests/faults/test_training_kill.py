"""SIGKILL a training process again and again: it ends with the weights of a calm run, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from pipeline_site import InMemory

from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort import Cohort
from deco_ray.cohort.splits import make_split
from deco_ray.config import ModelSection, ResourceSection, SplitSection, TrainingSection
from deco_ray.keys import generator
from deco_ray.training.runner import run_training
from deco_ray.training.spec import RunSpec

KILLS = 5
# processes that are forked from one which has imported everything: the imports take longer than the training
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["deco_ray.training.runner"])


def train(uri: str, root: Path, told) -> None:
    """In a process of its own: train from the last checkpoint on; tells every epoch, and at last the digest."""
    torch.set_num_threads(1)
    cohort = Cohort.open(uri)
    split = make_split(cohort, SplitSection(val_per_class=2, test_per_class=2))
    spec = RunSpec(
        cohort=cohort.checksum,
        split=split.digest,
        model=ModelSection(options={"hidden": 64, "dropout": 0.2}),
        training=TrainingSection(epochs=60, lr=5e-3, schedule="cosine", retrain_classifier_epochs=3),
    )
    source = InMemory(cohort)
    run_training(spec, cohort, split, ArtefactStore(root), ResourceSection(), source, report=lambda row: told.send(row))
    assert "torch._dynamo" not in sys.modules  # torch's compiler: seconds of every training process for nothing
    told.send(spec.digest)


def start(cohort, root):
    """The running process, and what it tells."""
    told, end = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=train, args=(cohort.uri, root, end))
    process.start()
    end.close()
    return process, told


def finish(process, told):
    """Lets a run end; the digest it told last."""
    digest = None
    while not isinstance(digest, str):
        digest = told.recv()
    process.join()
    assert process.exitcode == 0
    return digest


@pytest.mark.timeout(600)
def test_weights_survive_sigkill_at_random_points(tiny_cohort, tmp_path):
    digest = finish(*start(tiny_cohort, tmp_path / "calm"))
    rng = generator("kill points")
    killed = 0
    for _ in range(KILLS):
        process, told = start(tiny_cohort, tmp_path / "killed")
        for _ in range(int(rng.integers(1, 4))):  # far fewer than the run has left, five times over
            told.recv()
        time.sleep(rng.uniform(0, 0.04))  # somewhere in the next epoch, its validation or its checkpoint
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed >= 4
    assert finish(*start(tiny_cohort, tmp_path / "killed")) == digest
    calm, after = (ArtefactStore(tmp_path / name).path("model", digest) for name in ("calm", "killed"))
    left, right = (torch.load(folder / "model.pt", weights_only=True) for folder in (calm, after))
    for name in left:
        assert torch.equal(left[name], right[name]), name
    assert json.loads((after / "metrics.json").read_text())["resumes"] >= killed - 1
    assert (calm / "predictions.parquet").read_bytes() == (after / "predictions.parquet").read_bytes()
    assert not list((tmp_path / "killed" / "work").iterdir())
