"""Heatmaps of many slides on Ray: the same files as in one process, bad slides named."""

from __future__ import annotations

import numpy as np
import pytest

from deco_ray.errors import DecoError
from deco_ray.results.heatmap_batch import render_many
from deco_ray.results.heatmaps import SlideMaps, write_slide


def slide(number: int, **changes) -> SlideMaps:
    n = 30 + number
    coords = np.stack([np.arange(n) % 6, np.arange(n) // 6], 1) * 512
    values = np.linspace(-1, 1, n)
    given = {"assignment": np.arange(n) % 7, "contribution": values, "retention": values**2, "attention": values**2}
    return SlideMaps(f"s{number}", **({"coords": coords, "patch_size": 512.0} | given | changes))


def test_batches_equal_one_process_and_bad_slides_are_listed(ray_cluster, tmp_path):
    bad = {1: {"coords": None}, 2: {"image": tmp_path / "absent.svs"}}
    jobs = (slide(number, **bad.get(number, {})) for number in range(4))
    found = render_many(jobs, tmp_path / "many", total=4, keep_going=True, in_flight=2, label="")
    assert [entry.slide_id for entry in found] == ["s0", "s1", "s2", "s3"]
    assert [entry.error is None for entry in found] == [True, False, False, True]
    assert "s1 has no patch coordinates" in found[1].error
    assert "slide s2" in found[2].error
    for number in (0, 3):
        write_slide(slide(number), tmp_path / "one")
        for path in (tmp_path / "one").glob(f"s{number}.*"):
            assert path.read_bytes() == (tmp_path / "many" / path.name).read_bytes()


def test_the_first_bad_slide_stops_a_strict_batch(ray_cluster, tmp_path):
    with pytest.raises(DecoError, match="s1 has no patch coordinates"):
        render_many([slide(0), slide(1, coords=None)], tmp_path, label="")
