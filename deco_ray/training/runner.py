"""A run on Ray Train: from a spec to its artefact, whoever calls and however often it was killed before.

One worker, the rule: the loop runs in the calling process (a Tune trial's own actor, which already holds the
CPU or GPU) through Ray Train's local mode, so that no worker group has to start. More workers, which change
the batch size: a Ray Train worker group with a torch process group.
"""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray.train
import torch
from ray.train import WorkerGroupError
from ray.train.torch import TorchTrainer
from ray.util.queue import Empty, Queue

from deco_ray.anchors import Anchors, load_assignments
from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort.splits import Split
from deco_ray.cohort.store import Cohort
from deco_ray.config import ResourceSection
from deco_ray.counterfactual.table import slide_ratios
from deco_ray.errors import DecoError, StageError, portable
from deco_ray.keys import torch_seed
from deco_ray.models import Aggregator, create_model
from deco_ray.models.saved import load_model
from deco_ray.training.centres import patch_centres
from deco_ray.training.group import PeerLost, ProcessGroup, Solo
from deco_ray.training.loop import Report, train
from deco_ray.training.record import write_run
from deco_ray.training.shared import Handle
from deco_ray.training.slides import RunSlides, Source, run_slides
from deco_ray.training.spec import RunSpec


@dataclass(frozen=True)
class Job:
    """What a worker needs to train; picklable."""

    spec: RunSpec
    cohort: Cohort
    split: Split
    store: ArtefactStore
    resources: ResourceSection
    source: Handle
    label: str = ""


def run_training(
    spec: RunSpec,
    cohort: Cohort,
    split: Split,
    store: ArtefactStore,
    resources: ResourceSection,
    source: Handle,
    report: Report | None = None,
    label: str = "",
) -> Path:
    """The artefact folder of a run: the finished one, or trained now from wherever it was interrupted.

    `report` receives each epoch's metrics in the calling process; `label` shows a progress bar.
    """
    check(spec, cohort, split)
    if not store.exists("model", spec.digest):
        job = Job(spec, cohort, split, store, resources, source, label)
        with store.unless_made("model", spec.digest):
            if spec.workers == 1:
                TorchTrainer(
                    lambda: work(job, Solo(), report),
                    scaling_config=ray.train.ScalingConfig(num_workers=0),
                    run_config=run_config(job),
                ).fit()
            else:
                run_group(job, report)
    return store.path("model", spec.digest)


def run_group(job: Job, report: Report | None) -> None:
    """A worker group, started again when a worker died; an error of a worker's own is raised here at once."""
    deaths = 0
    while not group_ends(job, report):
        deaths += 1
        if deaths > job.resources.max_failures:
            raise StageError(
                f"all {deaths} starts of the run's workers ended with a death; see the Ray logs of their nodes"
            )
    # the controller may write its own notes after rank 0 has finished and cleaned up
    shutil.rmtree(job.store.work("model", job.spec.digest), ignore_errors=True)


def group_ends(job: Job, report: Report | None) -> bool:
    """Whether the group came to its end; rank 0's metrics come back through a queue, to be reported from here."""
    messages = Queue(actor_options={"num_cpus": 0})
    gpus = job.resources.gpus_per_run
    trainer = TorchTrainer(
        lambda: work_in_group(job, messages),
        scaling_config=ray.train.ScalingConfig(
            num_workers=job.spec.workers,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": job.resources.cpus_per_run} | ({"GPU": gpus} if gpus else {}),
        ),
        run_config=run_config(job),
    )
    own_error: Exception | None = None
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(trainer.fit)
            while not running.done() or not messages.empty():
                try:
                    told = messages.get(timeout=0.5)
                except Empty:
                    continue
                if isinstance(told, bytes):
                    own_error = own_error or pickle.loads(told)
                elif report:
                    report(told)
            running.result()
            return True
    except WorkerGroupError:
        if own_error is not None:
            raise own_error from None
        return False
    finally:
        messages.shutdown()


def work_in_group(job: Job, messages: Queue) -> None:
    """One worker: tells its own error before it ends with it, since Ray Train takes a bug for a death."""
    try:
        work(job, ProcessGroup(ray.train.torch.get_device()), messages.put)
    except PeerLost:
        raise
    except Exception as error:
        messages.put(portable(error))
        raise


def run_config(job: Job) -> ray.train.RunConfig:
    """Named by the digest; Ray Train's own state goes to the work folder, which vanishes with the run.

    Its failure policy stays at none: it would repeat a bug as often as a death.
    """
    return ray.train.RunConfig(
        name=job.spec.digest,
        storage_path=str(job.store.work("model", job.spec.digest).absolute() / "ray_train"),
    )


def work(job: Job, group: Solo, report: Report | None) -> None:
    """Train in this process; rank 0 writes the artefact."""
    spec, started = job.spec, time.time()
    with compute(spec.threads, job.resources.gpus_per_run > 0) as device:
        slides = prepare_slides(job)
        source = job.source.open()
        model = build_model(job, slides, source)
        folder = job.store.work("model", spec.digest)
        outcome = train(
            model, spec, slides, source, work=folder, report=report, device=device, group=group, label=job.label
        )
        if group.rank == 0:
            facts = {"stage": spec.stage, "train_seconds": time.time() - started}
            with job.store.writing("model", spec.digest, spec.inputs(), **facts) as target:
                write_run(target, model, job.spec, job.cohort, slides, source, outcome, device)


@contextmanager
def compute(threads: int, gpu: bool) -> Iterator[str]:
    """Torch set up so that a run repeats bit for bit: its thread count on a CPU, deterministic kernels on a GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if gpu:
        if not torch.cuda.is_available():
            raise DecoError("resources.gpus_per_run asks for a GPU, but torch sees none; set it to 0")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield "cuda" if gpu else "cpu"
    finally:
        torch.set_num_threads(before)


def prepare_slides(job: Job) -> RunSlides:
    """The split's slides; for DeCo with anchors and masking ratios of every training slide."""
    deco = job.spec.deco
    if deco is None:
        return run_slides(job.cohort, job.split)
    for kind, key in (("anchors", deco.anchors), ("contributions", deco.contributions)):
        if not job.store.exists(kind, key):
            raise DecoError(f"the run needs {kind} {key}, which {job.store.root} does not hold; run that stage first")
    folder = job.store.path("anchors", deco.anchors)
    slides = run_slides(job.cohort, job.split, load_assignments(folder))
    ratios = slide_ratios(
        job.store.path("contributions", deco.contributions),
        {slide: slides.labels[slide] for slide in slides.train},
        job.cohort.meta.normal_class,
        deco.masking,
        job.spec.seed,
        len(Anchors.load(folder).anchors),
    )
    return run_slides(job.cohort, job.split, slides.assignments, ratios)


def build_model(job: Job, slides: RunSlides, source: Source) -> Aggregator:
    """Freshly initialised from the seed, kind and name; with what the method wants before it starts."""
    spec = job.spec
    torch.manual_seed(torch_seed(*spec.key("init", spec.model.name)))
    model = create_model(spec.model.name, job.cohort.dim, slides.classes, **spec.model.options)
    if model.needs_centres:
        model.set_centres(patch_centres(slides, source, model.needs_centres, spec.seed))
    if spec.pretrained is not None:
        model.load_pretrained(load_model(job.store.path("model", spec.pretrained))[0].state_dict())
    return model


def check(spec: RunSpec, cohort: Cohort, split: Split) -> None:
    if (spec.cohort, spec.split) != (cohort.checksum, split.digest):
        raise DecoError(f"run {spec.digest} was specified for other data than cohort {cohort.name}, split {split.name}")
    for part in ("train", "val", "test"):
        if not split.ids(part):
            raise DecoError(f"split {split.name} of cohort {cohort.name} has no {part} slides")
