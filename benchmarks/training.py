"""Training visits and epochs against the usual ways to write them, on one thread, side by side in one run.

    python benchmarks/training.py [--quick]

The textbook visit is AB-MIL on the full bag with torch.optim.Adam. The four-forward visit is DeCo written
down as the equations stand: a forward for the reduced bag and one for each pseudo-bag, the same optimiser.
The CLAM-style loop loads one .pt file a visit, takes one bag a step and reads the loss out after each. Its slides
have the sizes of PANDA (epoch_vs_clam_loop) and of TissueNet (epoch_vs_clam_loop_tissuenet): the larger the bags,
the more of a step is the same matrix products in both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1")

import numpy as np
import psutil
import ray
import torch
import torch.nn.functional as F
from torch import nn

from deco_ray.cohort.presets import PRESETS
from deco_ray.cohort.schema import CohortMeta
from deco_ray.cohort.store import Cohort
from deco_ray.cohort.writer import CohortWriter, SlideFeatures
from deco_ray.config import OversamplingSection, TrainingSection
from deco_ray.keys import generator
from deco_ray.models import Visit, create_model
from deco_ray.progress import bar
from deco_ray.training.draws import draws
from deco_ray.training.engine import Engine
from deco_ray.training.group import Solo
from deco_ray.training.loop import train
from deco_ray.training.objective import visit_loss
from deco_ray.training.phases import phases
from deco_ray.training.shared import open_source
from deco_ray.training.slides import LocalSource, RunSlides
from deco_ray.training.spec import DecoSpec, RunSpec

DIM, CLASSES, K = 512, 4, 64
SIZES = (60, 400, 3000)
MEAN_RATIO = 0.25


class Textbook(nn.Module):
    """AB-MIL as in a tutorial; the same layers as ours."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(DIM, 512), nn.ReLU())
        self.attention = nn.Sequential(nn.Linear(512, 128), nn.Tanh(), nn.Linear(128, 1))
        self.classifier = nn.Linear(512, CLASSES)

    def forward(self, bag):
        hidden = self.embed(bag)
        weights = F.softmax(self.attention(hidden).transpose(0, 1), dim=1)
        return self.classifier(weights @ hidden)


def bags_of(n: int, count: int) -> RunSlides:
    """Slides of n patches with anchors and ratios; none is oversampled."""
    rng = generator("benchmark", n)
    ids = [f"s{index}" for index in range(count)]
    return RunSlides(
        ids,
        ids[:1],
        ids[:1],
        {slide: index % CLASSES for index, slide in enumerate(ids)},
        CLASSES,
        {slide: rng.integers(0, K, n).astype(np.int16) for slide in ids},
        {slide: rng.uniform(0, 2 * MEAN_RATIO, K) for slide in ids},
    )


def deco_spec() -> RunSpec:
    deco = DecoSpec(contributions="", anchors="", oversampling=OversamplingSection(alpha=0))
    return RunSpec(kind="deco", cohort="", split="", deco=deco)


def four_forwards(model, bag, label, members, criterion, beta):
    visit = Visit(model(bag), torch.stack([model(bag[positions]) for positions in members]))
    return visit_loss(visit, label, criterion, beta)[0]


def visit_times(n: int, repeats: int) -> dict[str, float]:
    """Median seconds a visit of each kind takes; the kinds take turns, so that a busy machine slows all alike."""
    count = 8 if n > 1000 else 32  # slides an epoch
    slides = bags_of(n, count)
    rng = generator("features", n)
    features = {s: F.normalize(torch.from_numpy(rng.standard_normal((n, DIM), dtype=np.float32))) for s in slides.train}
    spec, source = deco_spec(), LocalSource(features)
    ours = Engine(create_model("abmil", DIM, CLASSES), spec, slides, torch.device("cpu"), Solo())
    naive = Engine(create_model("abmil", DIM, CLASSES), spec, slides, torch.device("cpu"), Solo())
    textbook = Textbook()
    fused = torch.optim.Adam(ours.model.parameters(), lr=2e-4, weight_decay=1e-5, fused=True)
    plain = torch.optim.Adam(naive.model.parameters(), lr=2e-4, weight_decay=1e-5)
    usual = torch.optim.Adam(textbook.parameters(), lr=2e-4, weight_decay=1e-5)
    phase, scaler = phases(spec.training)[0], torch.amp.GradScaler("cpu", enabled=False)
    silent = bar(None, "")

    def deco(epoch: int) -> None:
        order = (visit.slide_id for visit in ours.share(phase, epoch)[0])
        ours.epoch(phase, epoch, source.bags(order), fused, scaler, silent)

    def sampling(epoch: int) -> None:
        visits, _ = ours.share(phase, epoch)
        for visit, draw in zip(visits, draws(spec, slides, epoch, visits)):
            draw.reduced(visit.slide_id, features[visit.slide_id])

    def naive_deco(epoch: int) -> None:
        visits, _ = naive.share(phase, epoch)
        for visit, draw in zip(visits, draws(spec, slides, epoch, visits)):
            plain.zero_grad()
            bag, members = draw.reduced(visit.slide_id, features[visit.slide_id]), draw.members
            label = naive.labels[slides.labels[visit.slide_id]]
            four_forwards(naive.model, bag, label, members, naive.criterion, naive.beta).backward()
            plain.step()

    def plain_visit(epoch: int) -> None:
        for slide in slides.train:
            usual.zero_grad()
            F.cross_entropy(textbook(features[slide]), torch.tensor([slides.labels[slide]])).backward()
            usual.step()

    kinds = {"deco": deco, "plain": plain_visit, "four": naive_deco, "sampling": sampling}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for epoch in range(repeats + 2):
        for name, run in kinds.items():
            started = time.thread_time()  # nothing waits here: wall time, less what other processes take
            run(epoch)
            if epoch >= 2:  # two rounds to warm up
                taken[name].append((time.thread_time() - started) / count)
    return {name: median(values) for name, values in taken.items()}


def write_slides(folder: Path, sizes: list[int]) -> tuple[Cohort, list[Path]]:
    """One cohort and the same slides as CLAM-style .pt files."""
    rng = generator("benchmark cohort")
    meta = CohortMeta(name="bench", classes=tuple("abcd"), normal_class=0, dim=DIM)
    files = []
    with CohortWriter(folder / "cohort", meta) as writer:
        for index, n in enumerate(sizes):
            features = rng.standard_normal((n, DIM), dtype=np.float32)
            writer.add(SlideFeatures(f"s{index:04d}", f"c{index}", index % CLASSES, features, None, None, None, None))
            files.append(folder / f"s{index:04d}.pt")
            torch.save(torch.from_numpy(features), files[-1])
    return Cohort.open(str(folder / "cohort")), files


def clam_epoch(model: nn.Module, optimiser: torch.optim.Optimizer, files: list[Path]) -> None:
    model.train()
    for index in torch.randperm(len(files)).tolist():
        bag = torch.load(files[index], weights_only=True)
        logits = model(bag)
        loss = F.cross_entropy(logits, torch.tensor([index % CLASSES]))
        loss.item()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()


def epoch_times(folder: Path, quick: bool, preset: str) -> dict[str, float]:
    """A plain epoch from a cohort against the CLAM-style loop, and the share of an epoch spent waiting for data."""
    middle, spread, least, most = PRESETS[preset].bag_size
    drawn = middle * np.exp(spread * generator("bag sizes", preset).standard_normal(200))
    folder.mkdir()
    cohort, files = write_slides(folder, np.clip(drawn, least, most).astype(int).tolist())
    ids = list(cohort.slides["slide_id"])
    labels = dict(zip(ids, cohort.slides["label"].astype(int)))
    slides = RunSlides(ids, ids[:1], ids[:1], labels, CLASSES)
    epochs = 6 if quick else 10
    spec = RunSpec(cohort="", split="", training=TrainingSection(epochs=epochs))
    usual = Textbook()
    optimiser = torch.optim.Adam(usual.parameters(), lr=2e-4, weight_decay=1e-5)
    ratios, waits = [], {}
    for how in ("memory", "stream"):
        openings = []
        for _ in range(4):  # the first ones start Ray's worker processes, which serve a whole study
            started = time.perf_counter()
            source = open_source(cohort, ids, how)[0].open()
            openings.append(time.perf_counter() - started)
        loading = min(openings)
        ours: list[float] = []
        clam: list[float] = []
        clock = [time.thread_time()]  # files are cached and bags in memory: CPU time is wall time on an idle machine

        def take_turns(row: dict, ours: list = ours, clam: list = clam, clock: list = clock) -> None:
            ours.append(time.thread_time() - clock[0])
            begun = time.thread_time()
            clam_epoch(usual, optimiser, files)
            clock[0] = time.thread_time()
            clam.append(clock[0] - begun)

        report = take_turns if how == "memory" else None
        history = train(create_model("abmil", DIM, CLASSES), spec, slides, source, report=report).history
        settled = history[1:]  # the first epoch also starts the readers
        waits[how] = sum(row["wait_seconds"] for row in settled) / sum(row["seconds"] for row in settled)
        if how == "memory":
            # a run of 30 epochs reads the cohort once: its share of that belongs to every epoch
            ratios = [theirs / (mine + loading / 30) for theirs, mine in zip(clam[1:], ours[1:])]
    return {"epoch": median(ratios), "wait_memory": waits["memory"], "wait_stream": waits["stream"]}


def streaming_memory(folder: Path, quick: bool, limit: int) -> tuple[float, float]:
    """MB this process grows by between the first and the last third of a stream three times the limit, and its MB."""
    n = 2000
    folder.mkdir()
    cohort, files = write_slides(folder, [n] * (int(3 * limit / (n * DIM * 4)) + 1))
    for path in files:
        path.unlink()
    handle, _ = open_source(cohort, [], "stream")
    process, resident, total = psutil.Process(), [], 0
    with contextlib.closing(handle.open().bags(cohort.slides["slide_id"])) as features:
        for _, bag in features:
            total += bag.nbytes
            resident.append(process.memory_info().rss)
    third = len(resident) // 3
    return (median(resident[-third:]) - median(resident[:third])) / 2**20, total / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and smaller cohorts, about a minute")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    shares = []
    print(f"{'patches':>8} {'textbook':>10} {'four':>10} {'DeCo':>10} {'sampling':>10}   ms a visit")
    for n in SIZES:
        times = visit_times(n, max(4, (1500 if quick else 4000) // (n // 8 + 30)))
        results[f"deco_vs_plain_{n}"] = times["deco"] / times["plain"]
        results[f"deco_vs_four_forward_{n}"] = times["deco"] / times["four"]
        shares.append(times["sampling"] / times["deco"])
        print(f"{n:>8} " + " ".join(f"{times[kind] * 1e3:>10.2f}" for kind in ("plain", "four", "deco", "sampling")))
    limit = (100 if quick else 300) * 2**20
    ray.init(
        address="local", num_cpus=2, object_store_memory=limit, include_dashboard=False, log_to_driver=False,
        logging_level="error",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        epochs = {name: epoch_times(Path(folder) / name, quick, name) for name in ("panda_lt", "tissuenet_lt")}
        growth, streamed = streaming_memory(Path(folder) / "memory", quick, limit)
    ray.shutdown()
    results["epoch_vs_clam_loop"] = epochs["panda_lt"]["epoch"]
    results["epoch_vs_clam_loop_tissuenet"] = epochs["tissuenet_lt"]["epoch"]
    waits = {how: max(epoch[f"wait_{how}"] for epoch in epochs.values()) for how in ("memory", "stream")}
    results["data_wait_share"] = max(waits.values())
    results["sampling_share"] = max(shares)
    print(f"waiting for data: {waits['memory']:.1%} from shared memory, {waits['stream']:.1%} streamed")
    print(f"streaming {streamed:.0f} MB with an object store of {limit / 2**20:.0f} MB: memory grew by {growth:.0f} MB")
    for name, value in results.items():
        print(f"{name:28} {value:.3f}")
    print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
