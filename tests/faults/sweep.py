"""Part of `make chaos`: a sweep of 30 final models whose driver and then a worker are killed, against a calm one.

python tests/faults/sweep.py
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from conftest import write_tiny_cohort
from pipeline_site import fingerprint, leftovers, tiny_config

ROOT = Path(__file__).parents[2]
JOB, SWEEP = ROOT / "jobs" / "sweep.py", ROOT / "configs" / "sweeps" / "lambda.yaml"
SETTINGS = {"seeds": [0, 1, 2, 3, 4], "judge_training.epochs": 4, "training.epochs": 30, "report.heatmaps": 0}


def start(cohort: str, storage: Path) -> subprocess.Popen[str]:
    base = storage.with_suffix(".yaml")
    config = tiny_config(cohort, storage, **SETTINGS)
    base.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, str(JOB), "--config", str(SWEEP), "--base", str(base)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finals(storage: Path) -> int:
    records = [json.loads(path.read_text()) for path in storage.glob("*/model/*/artefact.json")]
    return sum(record["stage"] == "final" for record in records)


def workers(driver: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith("ray::ImplicitFunc"):
                found.append(process)
    return found


def interrupt(cohort: str, storage: Path, after: int, strike: Callable[[int], None]) -> int:
    """Strike once so many final models are done; the driver's exit code."""
    job = start(cohort, storage)
    while finals(storage) < after and job.poll() is None:
        time.sleep(0.05)
    strike(job.pid)
    said = job.communicate()[0]
    if job.returncode > 0:
        raise SystemExit(said[-3000:])
    return job.returncode


def kill_driver(driver: int) -> None:
    family = psutil.Process(driver).children(recursive=True)
    os.kill(driver, 9)
    psutil.wait_procs(family, timeout=60)  # its Ray ends by itself


def kill_worker(driver: int) -> None:
    workers(driver)[0].kill()


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="deco-sweep-"))
    cohort = write_tiny_cohort(root / "tiny").uri
    calm = start(cohort, root / "calm")
    said = calm.communicate()[0]
    if calm.returncode:
        raise SystemExit(said[-3000:])
    killed = interrupt(cohort, root / "killed", 8, kill_driver)
    done = finals(root / "killed")
    ended = interrupt(cohort, root / "killed", 16, kill_worker)
    same = fingerprint(root / "killed") == fingerprint(root / "calm") and not leftovers(root / "killed")
    print(json.dumps({"trials": finals(root / "killed"), "done when the driver died": done, "identical": same}))
    if same:
        shutil.rmtree(root)
    return 0 if same and killed < 0 and ended == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
