"""Reading bags and ingesting slides, beside what people use today; ratios above 1 mean we are faster.

    python benchmarks/reading.py [--quick]

Readings are of bags taken one at a time and dropped again, as training does, each way in a process of its own,
after one pass to warm up, on one core. They are timed in CPU seconds, which equal the seconds of an idle machine
because the files are in its page cache. How fast torch.load is depends on whether the allocator gives it used or
fresh memory, and that on what the process did before; the bare copy of a tensor shows what the machine allows.
Ingest is timed by the clock, on a Ray of two CPUs that is already up.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

DIM = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--slides", type=int, default=20)
    parser.add_argument("--patches", type=int, default=4000)
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 9
    root = Path(tempfile.mkdtemp(prefix="deco_ray_reading_"))
    try:
        # all in children: the memory a process has used before changes what its next allocation costs
        _apart(_make, root, arguments.slides, arguments.patches)
        megabytes = arguments.slides * arguments.patches * DIM * 4 / 2**20
        ways = {
            "Cohort.bag": _read_cohort,
            "torch.load .pt": _read_pt,
            "h5py CLAM h5": _read_h5,
            "copy in memory": _copy,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                seconds[name].append(_apart(way, root))
        copies, ingests = _apart(_ingests, root, repeats)
        seconds |= {"plain pyarrow copy": copies, "ingest": ingests}
    finally:
        shutil.rmtree(root, ignore_errors=True)
    middle = {name: median(values) for name, values in seconds.items()}
    print(f"{arguments.slides} slides x {arguments.patches} patches x {DIM} float32, {repeats} repeats\n")
    print(f"{'':<20}{'seconds':>10}{'MB/s':>10}")
    for name, value in middle.items():
        print(f"{name:<20}{value:>10.3f}{megabytes / value:>10,.0f}")
    ratios = {
        "vs_torch_load": middle["torch.load .pt"] / middle["Cohort.bag"],
        "vs_clam_h5": middle["h5py CLAM h5"] / middle["Cohort.bag"],
        "vs_memory_copy": middle["copy in memory"] / middle["Cohort.bag"],
        "ingest_vs_plain_copy": middle["plain pyarrow copy"] / middle["ingest"],
    }
    print(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))


def _apart(function: Callable, *arguments):
    """The function's result, from a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def _make(root: Path, slides: int, patches: int) -> None:
    import h5py
    import numpy as np
    import torch

    from deco_ray.cohort.schema import CohortMeta
    from deco_ray.cohort.writer import CohortWriter, SlideFeatures

    for name in ("pt_files", "h5_files"):
        (root / name).mkdir()
    rows = ["case_id,slide_id,label"]
    with CohortWriter(root / "cohort", CohortMeta(name="reading", classes=("0",), dim=DIM)) as writer:
        for index in range(slides):
            features = np.random.default_rng(index).standard_normal((patches, DIM), dtype=np.float32)
            coords = np.stack([np.arange(patches) % 64, np.arange(patches) // 64], 1) * 512
            writer.add(SlideFeatures(f"s{index:03d}", "c", 0, features, coords))
            torch.save(torch.from_numpy(features), root / "pt_files" / f"s{index:03d}.pt")
            with h5py.File(root / "h5_files" / f"s{index:03d}.h5", "w") as file:
                file.create_dataset("features", data=features, chunks=(1, DIM))
                file.create_dataset("coords", data=coords.astype(np.int32), chunks=(1, 2))
            rows.append(f"c,s{index:03d},0")
    (root / "pt_files" / "labels.csv").write_text("\n".join(rows))


def _timed(read: Callable, slides: list) -> float:
    """CPU seconds of reading every slide once, after a first pass."""
    import torch

    torch.set_num_threads(1)
    for _ in range(2):
        started = time.process_time()
        for slide in slides:
            features = read(slide)
            assert features.dtype == torch.float32
        seconds = time.process_time() - started
    return seconds


def _read_cohort(root: Path) -> float:
    from deco_ray.cohort import Cohort

    cohort = Cohort.open(root / "cohort")
    slides = cohort.slides["slide_id"].tolist()
    return _timed(lambda slide: cohort.bag(slide).features, slides)


def _read_pt(root: Path) -> float:
    import torch

    paths = sorted((root / "pt_files").glob("*.pt"))
    return _timed(lambda path: torch.load(path, weights_only=True), paths)


def _read_h5(root: Path) -> float:
    import h5py
    import torch

    def read(path: Path) -> torch.Tensor:
        with h5py.File(path) as file:
            file["coords"][()]
            return torch.from_numpy(file["features"][()])

    paths = sorted((root / "h5_files").glob("*.h5"))
    return _timed(read, paths)


def _copy(root: Path) -> float:
    """The least that any reader does: the bag's bytes moved once, from memory to memory that is in use already."""
    import torch

    bags = [torch.load(path, weights_only=True) for path in sorted((root / "pt_files").glob("*.pt"))]
    target = torch.empty_like(bags[0])
    return _timed(target.copy_, bags)


def _ingests(root: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of plain copies and of ingests, in turn, after one of each to warm up."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray
    import torch

    from deco_ray.cohort import ingest
    from deco_ray.cohort.writer import SlideFeatures, patch_table

    def copy() -> None:
        pa.set_cpu_count(1)
        writer = None
        for path in sorted((root / "pt_files").glob("*.pt")):
            features = torch.load(path, weights_only=True).numpy()
            table = patch_table(SlideFeatures(path.stem, "c", 0, features), "float32")
            writer = writer or pq.ParquetWriter(root / "copy.parquet", table.schema, compression="none")
            writer.write_table(table, row_group_size=len(table))
        assert writer is not None
        writer.close()

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    copies, ingests = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        copy()
        copies.append(time.perf_counter() - started)
        (root / "copy.parquet").unlink()
        started = time.perf_counter()
        ingest(root / "pt_files", root / "ingested")
        ingests.append(time.perf_counter() - started)
        shutil.rmtree(root / "ingested")
    ray.shutdown()
    return copies[1:], ingests[1:]


if __name__ == "__main__":
    main()
