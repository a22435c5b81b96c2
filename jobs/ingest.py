"""`ray job submit -- python jobs/ingest.py SOURCE OUT …`; --help says what it does."""

from deco_ray.cli import run_job
from deco_ray.cohort.ingest_command import main

if __name__ == "__main__":
    run_job(main)
