"""`make chaos`: random fault schedules in a row, each compared with the calm run bit for bit.

    python tests/faults/chaos.py --schedules 20 --seed 0

A schedule strikes one to four times: the driver, the process of a trial or a whole node, at a random result of a
random stage and a random moment after it. A schedule that kills its driver runs the same command again until it
ends. Every line names the seed that repeats it: `--schedules 1 --seed N`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import write_tiny_cohort
from pipeline_site import fingerprint, leftovers, tiny_config

from deco_ray.keys import generator

PROGRAM = Path(__file__).with_name("faulty_pipeline.py")
STAGES = [f"{kind} seed {seed}" for kind in ("judge", "contributions", "final") for seed in (0, 1)]
EPOCHS = 4


def schedule(seed: int) -> tuple[list[dict[str, Any]], int]:
    """Faults and number of nodes: 0 is a local Ray, whose only node cannot be lost."""
    rng = generator(seed, "chaos")
    nodes = int(rng.choice([0, 3]))
    kinds = ["driver", "trial"] if nodes == 0 else ["trial", "node", "node"]  # killing a cluster's driver orphans it
    faults = []
    for stage in rng.choice(STAGES, size=int(rng.integers(1, 5)), replace=False):
        at = 1 if stage.startswith("contributions") else int(rng.integers(1, EPOCHS))
        # half strike while the trial waits, half while it works on
        delay = float(rng.choice([0.0, rng.uniform(0.01, 0.3)]))
        faults.append({"what": str(rng.choice(kinds)), "stage": str(stage), "at": at, "delay": delay})
    return faults, nodes


def run(cohort: str, storage: Path, faults: list[dict[str, Any]], nodes: int = 0) -> tuple[int, list[dict[str, Any]]]:
    """Run until the command ends by itself; how often its driver was killed, and the faults that struck."""
    settings = {"judge_training.epochs": EPOCHS, "training.epochs": EPOCHS, "report.heatmaps": 0}
    config = tiny_config(cohort, storage, **settings).model_dump(mode="json")
    killed, left, struck = 0, list(faults), []
    while True:
        play = json.dumps({"nodes": nodes, "acts": [{"config": config, "faults": left}]})
        done = subprocess.run([sys.executable, str(PROGRAM), play], capture_output=True, text=True, check=False)
        lines = [line.removeprefix("strike ") for line in done.stderr.splitlines() if line.startswith("strike ")]
        new = [json.loads(line) for line in lines]
        struck += new
        left = [fault for fault in left if fault not in new]
        if done.returncode == -signal.SIGKILL:
            killed += 1
            continue
        if done.returncode != 0:
            raise SystemExit(f"the pipeline ended with {done.returncode}:\n{done.stderr[-4000:]}")
        told = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
        if told["failures"] or told["error"]:
            raise SystemExit(f"stages failed: {told['failures']} {told['error']}")
        return killed, struck


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="deco-chaos-"))
    cohort = write_tiny_cohort(root / "tiny").uri
    begun = time.monotonic()
    run(cohort, root / "calm", [])
    calm, calm_s = fingerprint(root / "calm"), time.monotonic() - begun
    print(f"calm run: {len(calm)} artefacts in {calm_s:.0f} s", flush=True)
    differences, calm_schedules = 0, 0
    for seed in range(args.seed, args.seed + args.schedules):
        storage, begun = root / f"seed {seed}", time.monotonic()
        faults, nodes = schedule(seed)
        killed, struck = run(cohort, storage, faults, nodes)
        same = fingerprint(storage) == calm and not leftovers(storage)
        differences += not same
        calm_schedules += not struck  # its moments never came: it shows nothing
        told = ", ".join(f"{fault['what']} at {fault['stage']} result {fault['at']}" for fault in struck)
        where = f"{nodes} nodes" if nodes else "one node"
        verdict = "identical" if same else f"DIFFERENT ({storage})"
        seconds = time.monotonic() - begun
        print(f"seed {seed}: {verdict}, {seconds:.0f} s, {killed} restarts, {where}: {told}", flush=True)
        if same:
            shutil.rmtree(storage)
    found = {"schedules": args.schedules, "without a fault": calm_schedules, "differences": differences}
    print(json.dumps({**found, "calm_seconds": round(calm_s, 1)}))
    if not differences:
        shutil.rmtree(root)
    return 1 if differences or calm_schedules else 0


if __name__ == "__main__":
    sys.exit(main())
