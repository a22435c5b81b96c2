"""How Ray is joined or started, without a Ray."""

import socket

import pytest
import ray

from deco_ray.cluster import STARTS, start_ray
from deco_ray.errors import DecoError


@pytest.fixture
def starts(monkeypatch):
    """What Ray was asked for; put exceptions into `.failures` to let the next starts fail."""

    class Starts(list):
        def __init__(self):
            super().__init__()
            self.failures = []

    found = Starts()

    def init(**options):
        found.append(options)
        if found.failures:
            raise found.failures.pop(0)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


SLOW = "The current node timed out during startup."


def test_without_an_address_ray_starts_here_and_joins_nobody(starts):
    start_ray(include_dashboard=False)
    assert [(one["address"], one["include_dashboard"]) for one in starts] == [("local", False)]


@pytest.fixture
def listening(monkeypatch):
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield address


def test_with_an_address_ray_is_joined_as_it_is(starts, listening):
    start_ray(include_dashboard=False)
    assert len(starts) == 1
    assert not {"address", "include_dashboard"} & starts[0].keys()  # Ray reads the variable itself


def test_a_ray_that_runs_is_left_alone(starts, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    start_ray()
    assert starts == []


def test_a_start_that_was_too_slow_is_tried_again(starts):
    starts.failures = [Exception(SLOW)]
    start_ray()
    assert len(starts) == 2


def test_a_start_that_keeps_failing_is_told_with_where_to_look(starts):
    starts.failures = [Exception(SLOW)] * STARTS
    with pytest.raises(DecoError, match=r"cannot start Ray on this machine: The current node .*session_latest/logs"):
        start_ray()
    assert len(starts) == STARTS


def test_a_cluster_that_refuses_is_told_at_once(starts, listening):
    starts.failures = [ConnectionError("Failed to connect")]
    with pytest.raises(DecoError, match=rf"cannot reach Ray at RAY_ADDRESS={listening}: Failed.*Unset RAY_ADDRESS"):
        start_ray()
    assert len(starts) == 1


@pytest.mark.parametrize("address", ["{}", "ray://{}", "127.0.0.1", "127.0.0.1:none"])
def test_an_address_where_nobody_listens_is_told_without_ray(starts, monkeypatch, address):
    """Ray would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = address.format(f"127.0.0.1:{gone.getsockname()[1]}")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(DecoError, match=rf"RAY_ADDRESS={address}: nobody answers.*Unset RAY_ADDRESS"):
        start_ray()
    assert starts == []


@pytest.mark.parametrize("address", ["auto", "local"])
def test_an_address_ray_finds_itself_is_left_to_it(starts, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    start_ray()
    assert len(starts) == 1
