"""The deployment files load, and Ray's own schema accepts the cluster file."""

import itertools
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


def test_ray_accepts_the_cluster_file():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]


def test_the_rayjob_runs_the_main_job_with_an_installed_version():
    import ray

    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert job["kind"] == "RayJob"
    assert "jobs/full_pipeline.py" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        mounts = {m["name"] for c in group["template"]["spec"]["containers"] for m in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_the_keys_that_the_deployment_sets_exist():
    from deco_ray.config import load_config

    entry = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())["spec"]["entrypoint"].split()
    overrides = [word for previous, word in itertools.pairwise(entry) if previous == "--set"]
    assert load_config(None, overrides).resources.gpus_per_run == 0.25
