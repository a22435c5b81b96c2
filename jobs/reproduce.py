"""`ray job submit -- python jobs/reproduce.py --config …`; --help says what it does."""

from deco_ray.cli import run_job
from deco_ray.experiments.reproduce_command import main

if __name__ == "__main__":
    run_job(main)
