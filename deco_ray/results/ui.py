"""`deco-ray ui`: MLflow's pages over the runs of a storage folder, on this machine only."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deco_ray.errors import DecoError
from deco_ray.results.tracking import ARTIFACTS, DATABASE

HOST = "127.0.0.1"  # the pages have no password
LAST_PORT = 2**16 - 1


def server_command(storage: str | Path, host: str = HOST, port: int = 5000) -> list[str]:
    """The MLflow server over <storage>/mlflow.db, after checking that there is something to show and a port to use."""
    database = Path(storage).absolute() / DATABASE
    if not database.is_file():
        raise DecoError(
            f"no tracked runs in {database.parent} (no {DATABASE} there); run `make demo` or a job first, or name the "
            "folder with --storage. Runs tracked on a server (tracking.uri) are browsed at that server"
        )
    check_port(host, port)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}"]
    # what others log through this server lies with our runs, not in whatever folder it was started from
    command += ["--artifacts-destination", str(database.parent / ARTIFACTS)]
    # one worker: the pages of one reader, up in half the time on a small machine
    return [*command, "--host", host, "--port", str(port), "--workers", "1"]


def server_environment() -> dict[str, str]:
    """No reports to anybody, and none of the eight processes that wait for jobs only language models submit."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return {**os.environ, **quiet}


def check_port(host: str, port: int) -> None:
    """Refuse what is no port or one that somebody listens on, before MLflow says it in thirty lines."""
    if not 0 < port <= LAST_PORT:
        raise DecoError(f"there is no port {port}; choose one from 1 to {LAST_PORT} with --port")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            other = port + 1 if port < LAST_PORT else port - 1
            raise DecoError(f"cannot listen on {host}:{port}: {reason}; choose another with --port {other}") from None


def serve_ui(storage: str | Path, host: str = HOST, port: int = 5000) -> int:
    """Serve the pages in the foreground until Ctrl-C or SIGTERM; returns the exit code."""
    command = server_command(storage, host, port)
    address = f"http://{host}:{port}/#/experiments?workflowType=machine_learning"
    print(f"MLflow over {Path(storage).absolute()}: open {address} (Ctrl-C ends it)", flush=True)
    # a session of its own: MLflow's workers outlive a signal to their parent, so all of them are told
    server = subprocess.Popen(command, env=server_environment(), start_new_session=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="deco-ray ui", description="Browse tracked runs in MLflow, on this machine only."
    )
    parser.add_argument("--storage", default="runs", help="folder that holds mlflow.db (default: runs)")
    parser.add_argument("--port", type=int, default=5000, help="port on 127.0.0.1 (default: 5000)")
    options = parser.parse_args(argv)
    return serve_ui(options.storage, port=options.port)
