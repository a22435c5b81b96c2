"""The Ray that work runs on: the cluster of the job, or one of its own on this machine."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from deco_ray.address import ray_address, reachable
from deco_ray.errors import DecoError

STARTS = 3  # Ray gives a node's agent 15 s, which cannot be set and which a busy machine exceeds now and then
ANSWER_S = 10.0  # of a cluster somebody named; Ray itself tries for minutes


def start_ray(**local: Any) -> None:
    """Join the cluster of the job, or start a Ray here with the `local` options; nothing where Ray runs already."""
    if ray.is_initialized():
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    # `ray job submit` sets RAY_ADDRESS; without it never join a Ray that merely happens to run here
    address = os.environ.get("RAY_ADDRESS")
    if address not in (None, "", "auto", "local") and not reachable(str(ray_address(os.environ)), ANSWER_S):
        raise unreachable(address, f"nobody answers there within {ANSWER_S:g} s")
    options = {} if address else {"address": "local", **local}
    for attempt in range(STARTS):
        try:
            ray.init(
                **options,
                logging_level=logging.ERROR,  # warnings of a healthy start would bury the messages that matter
                log_to_driver=os.environ.get("DECO_RAY_WORKER_LOGS") == "1",
            )
            return
        except Exception as error:  # Ray raises a bare Exception for a node that was too slow to start
            if address:
                raise unreachable(address, error) from error
            if attempt + 1 == STARTS:
                raise DecoError(
                    f"cannot start Ray on this machine: {error}. Its logs are in ray/session_latest/logs below the "
                    "temporary folder (RAY_TMPDIR); `deco-ray doctor` tells what is wrong with the machine"
                ) from error


def unreachable(address: str | None, why: object) -> DecoError:
    return DecoError(
        f"cannot reach Ray at RAY_ADDRESS={address}: {why}. Unset RAY_ADDRESS to run locally; `ray start` and whoever "
        "joins it both need RAY_AUTH_MODE=token exported"
    )
