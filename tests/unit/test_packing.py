"""Arrays arrive as they left, and may be changed."""

from __future__ import annotations

import numpy as np
import pytest

from deco_ray.cohort.packing import pack, unpack


def test_arrays_of_any_shape_survive():
    rows = [
        {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.float32(3.5), "text": np.array(["x", "yz"])},
        {"a": np.zeros((0, 3)), "t": np.ones((4, 4)).T[1:]},
        {},
    ]
    received = list(unpack(pack(["s", "t", "u"], rows)))
    assert [slide for slide, _, _ in received] == ["s", "t", "u"]
    for (_, arrays, error), sent in zip(received, rows):
        assert error == b""
        assert list(arrays) == list(sent)
        for name in sent:
            np.testing.assert_array_equal(arrays[name], sent[name])
            assert arrays[name].dtype == np.asarray(sent[name]).dtype
            assert arrays[name].flags.writeable


def test_an_error_follows_the_results_before_it():
    received = list(unpack(pack(["s"], [{"a": np.ones(2)}], b"why")))
    assert [error for _, _, error in received] == [b"", b"why"]


def test_python_objects_are_refused():
    with pytest.raises(TypeError, match="'a' holds Python objects"):
        pack(["s"], [{"a": np.array([{}], dtype=object)}])
