"""`ray job submit -- python jobs/sweep.py --config …`; --help says what it does."""

from deco_ray.cli import run_job
from deco_ray.experiments.sweep_command import main

if __name__ == "__main__":
    run_job(main)
