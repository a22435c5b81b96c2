"""The main job: `ray job submit -- python jobs/full_pipeline.py --config configs/panda_lt.yaml`."""

from deco_ray.cli import run_job
from deco_ray.experiments.pipeline_command import main

if __name__ == "__main__":
    run_job(main)
