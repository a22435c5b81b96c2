"""Training step of every aggregator against AB-MIL's, peak memory, and growth with the number of patches.

    python benchmarks/models.py [--quick]

All on one thread. A step is visit, backward, Adam and the teacher's update, on one slide; methods take turns and
a ratio is that of the medians. Peak memory is what a process of its own takes on top of the imported libraries: bag,
model, optimiser and step. Long bags (20,000 patches) are for the methods whose attention or graph spans all patches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch.nn.functional import cross_entropy

from deco_ray.models import Partner, create_model, model_names
from deco_ray.progress import track

DIM, CLASSES = 512, 4
LONG = ("transmil", "amdmil", "wikg")


def unit_bag(n: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(n, DIM), dim=1)


def training_step(name: str, n: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = create_model(name, DIM, CLASSES).train()
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-4, fused=True)
    bag, label = unit_bag(n), torch.tensor(1)
    partner = Partner(unit_bag(n), torch.tensor(2)) if model.needs_partner else None

    def step() -> None:
        visit = model.visit(bag, label, criterion=cross_entropy, partner=partner)
        loss = visit.main_weight * cross_entropy(visit.logits, label) + sum(visit.extra.values())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        model.after_step(0.0)

    return step


def forward(name: str, n: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model, bag = create_model(name, DIM, CLASSES).eval(), unit_bag(n)

    def run() -> None:
        with torch.inference_mode():
            model(bag)

    return run


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def medians(works: dict[str, Callable[[], None]], repeats: int, label: str) -> dict[str, float]:
    """Median seconds of each, one after another in turns, after one call that does not count."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in track(range(repeats), total=repeats, label=label, unit="round"):
        for name, work in works.items():
            times[name].append(seconds(work))
    return {name: statistics.median(values) for name, values in times.items()}


def peak_mib(name: str, n: int, pipe: Connection) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = training_step(name, n)
    step()
    step()  # from the second on, Adam's state is there as well
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def measure_peak(name: str, n: int) -> float:
    """Peak MiB of one step in a fresh process; forked, since an exec'd one would inherit its parent's peak."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=peak_mib, args=(name, n, sender))
    process.start()
    sender.close()  # so that a child killed for its memory ends the wait
    peak = receiver.recv()
    process.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; long bags in time only")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    names = model_names()
    sizes = (400, 4000)
    # first of all, while this process has touched little memory and started no thread
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # its imports take seconds: once, not in every child
    jobs = [(name, 4000) for name in names] + ([] if quick else [(name, 20_000) for name in LONG])
    peaks = {job: measure_peak(*job) for job in track(jobs, total=len(jobs), label="memory", unit="model")}
    steps = {
        n: medians({name: training_step(name, n) for name in names}, repeats, f"steps of {n} patches")
        for n, repeats in zip(sizes, (3, 1) if quick else (15, 5))
    }
    works = {f"{name} {n}": forward(name, n) for name in ("transmil", "amdmil") for n in (1000, 16_000)}
    growth = medians(works, 3 if quick else 7, "forwards of 16,000 patches")
    print(f"{'method':<10} {'step, 400':>11} {'vs AB-MIL':>10} {'step, 4000':>12} {'vs AB-MIL':>10} {'peak, 4000':>11}")
    for name in names:
        cells = []
        for n in sizes:
            cells += [f"{1000 * steps[n][name]:8.1f} ms", f"{steps[n][name] / steps[n]['abmil']:8.2f} x"]
        print(f"{name:<10} {cells[0]:>11} {cells[1]:>10} {cells[2]:>12} {cells[3]:>10} {peaks[name, 4000]:7.0f} MiB")
    for name in ("transmil", "amdmil"):
        short, long = growth[f"{name} 1000"], growth[f"{name} 16000"]
        print(f"{name}: forward of 1,000 patches {1000 * short:.0f} ms, of 16,000 {1000 * long:.0f} ms")
    if not quick:
        for name in LONG:
            print(f"{name}: training step of 20,000 patches, peak {peaks[name, 20_000]:.0f} MiB")
    ratios = {f"{name}_vs_abmil_400": steps[400][name] / steps[400]["abmil"] for name in names}
    ratios |= {
        f"{name}_16000_vs_1000": growth[f"{name} 16000"] / growth[f"{name} 1000"] for name in ("transmil", "amdmil")
    }
    print(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))


if __name__ == "__main__":
    main()
