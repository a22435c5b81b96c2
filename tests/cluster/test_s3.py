"""A cohort in an object store: the same bags, read by range, through an S3 server of our own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from moto.server import ThreadedMotoServer

from deco_ray.cohort import Cohort
from deco_ray.cohort.store import locate
from deco_ray.cohort.stream import stream_bags
from deco_ray.errors import CohortError


@pytest.fixture(scope="module")
def bucket(tiny_cohort):
    """s3://.../tiny with the files of the tiny cohort."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    options = f"endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1&allow_bucket_creation=true"
    uri = f"s3://key:secret@cohorts/tiny?{options}"
    filesystem, root = locate(uri)
    filesystem.create_dir("cohorts")
    local, source = locate(tiny_cohort.uri)
    for name in ("cohort.json", "slides.parquet", "patches/part-00000.parquet"):
        with local.open_input_file(f"{source}/{name}") as file, filesystem.open_output_stream(f"{root}/{name}") as out:
            out.write(file.read())
    yield uri
    server.stop()


def test_bags_are_the_same_as_from_a_folder(bucket, tiny_cohort):
    cohort = Cohort.open(bucket)
    assert cohort.checksum == tiny_cohort.checksum
    for slide in tiny_cohort.slides["slide_id"]:
        remote, local = cohort.bag(slide), tiny_cohort.bag(slide)
        assert torch.equal(remote.features, local.features)
        np.testing.assert_array_equal(remote.coords, local.coords)


def test_workers_stream_from_it(ray_cluster, bucket, tiny_cohort):
    ids = list(tiny_cohort.slides["slide_id"])[:6]
    for slide, bag in zip(ids, stream_bags(Cohort.open(bucket), ids), strict=True):
        assert bag.slide_id == slide
        assert torch.equal(bag.features, tiny_cohort.bag(slide).features)


def test_what_is_not_there_is_said_without_the_credentials(bucket):
    with pytest.raises(CohortError, match="no cohort at s3://cohorts/none") as caught:
        Cohort.open(bucket.replace("/tiny", "/none"))
    assert "secret" not in str(caught.value)


def test_a_truncated_object_names_the_slide(bucket):
    filesystem, root = locate(bucket)
    with filesystem.open_input_file(f"{root}/patches/part-00000.parquet") as file:
        data = file.read()
    uri = bucket.replace("/tiny", "/cut")
    other, target = locate(uri)
    for name in ("cohort.json", "slides.parquet"):
        with filesystem.open_input_file(f"{root}/{name}") as file, other.open_output_stream(f"{target}/{name}") as out:
            out.write(file.read())
    with other.open_output_stream(f"{target}/patches/part-00000.parquet") as out:
        out.write(data[: len(data) // 2])
    cohort = Cohort.open(uri)
    with pytest.raises(CohortError, match=r"slide s0_000: cannot read s3://cohorts/cut/patches/part-00000.parquet"):
        cohort.bag("s0_000")
