"""`ray job submit -- python jobs/predict.py …`; --help says what it does."""

from deco_ray.cli import run_job
from deco_ray.results.predict_command import main

if __name__ == "__main__":
    run_job(main)
