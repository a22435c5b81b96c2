"""MLflow for real: a logged model answers requests, a tracking server goes away and returns, five write at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fabricated_run import write_run_artefact
from servers import PATIENCE_S, answers, running

from deco_ray.cohort.store import Cohort
from deco_ray.config import TrackingSection
from deco_ray.experiments.demo_command import free_port
from deco_ray.results.mlflow_model import ServedModel
from deco_ray.results.tracking import HTTP_PATIENCE, Tracker
from deco_ray.results.ui import check_port, server_command


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_cohort) -> Path:
    storage = tmp_path_factory.mktemp("storage")
    Tracker.open(TrackingSection(), storage, tiny_cohort).parent("first touch", "pipeline", "d").finish()
    return storage


def post(url: str, body: object) -> tuple[int, dict]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_logged_model_answers_requests(store, tiny_cohort, tmp_path):
    folder = write_run_artefact(tmp_path / "run")
    tracker = Tracker.open(TrackingSection(), store, tiny_cohort)
    child = tracker.child(tracker.parent("p", "pipeline", "serve"), "final s0", "serve-0")
    child.log_run_artefact(folder)

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = [sys.executable, "-m", "mlflow", "models", "serve", "-m", f"runs:/{child.run_id}/model"]
    serve += ["--env-manager", "local", "--port", str(port)]
    # the command finds uvicorn on the PATH, as in an activated environment
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with running(serve, f"{url}/ping", tmp_path / "serve.log", MLFLOW_TRACKING_URI=tracker.uri, PATH=path):
        for patches in (1, 2, 300):  # a bag of any size, raw features
            bag = 3 * torch.randn(patches, 16)
            status, answer = post(f"{url}/invocations", {"inputs": bag.tolist()})
            assert status == 200
            np.testing.assert_allclose(answer["predictions"], ServedModel(folder).predict(bag), rtol=1e-4)
            assert sum(answer["predictions"]) == pytest.approx(1)
        for wrong in ([[1.0] * 15], [[0.0] * 16], []):
            assert post(f"{url}/invocations", {"inputs": wrong})[0] == 400


def test_a_server_that_dies_loses_nothing(store, tiny_cohort, tmp_path, caplog):
    folder = write_run_artefact(tmp_path / "run", epochs=6)
    history = pd.read_parquet(folder / "history.parquet")
    port = free_port()
    section = TrackingSection(uri=f"http://127.0.0.1:{port}", experiment="on a server")

    def open_child() -> tuple:
        tracker = Tracker.open(section, tmp_path, tiny_cohort)
        return tracker, tracker.child(tracker.parent("p", "pipeline", "d0"), "final", "d1")

    with running(server_command(store, port=port), f"{section.uri}/health", tmp_path / "first.log"):
        _, child = open_child()
        child.log_epochs(history[:3])
    begun = time.monotonic()
    child.log_epochs(history[:4])  # while the server is gone
    child.log_run_artefact(folder)
    assert time.monotonic() - begun < 120  # two tries of 10 s each, not minutes of retries
    assert len([record for record in caplog.records if "run the same command again" in record.getMessage()]) == 1

    with running(server_command(store, port=port), f"{section.uri}/health", tmp_path / "second.log"):
        tracker, again = open_child()
        assert again.run_id == child.run_id
        again.log_run_artefact(folder)
        assert again.complete
        points = tracker.call(lambda client: client.get_metric_history(child.run_id, "epochs/train_loss"))
        assert [point.step for point in points] == list(range(6))
        assert open_child()[1].complete


def test_a_server_that_stops_answering_costs_seconds(tiny_cohort, tmp_path, caplog, monkeypatch):
    """It is up when asked for its health, and answers nothing else."""
    for name in HTTP_PATIENCE:
        monkeypatch.setenv(name, "1")
    over = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/health":
                over.wait(PATIENCE_S)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        section = TrackingSection(uri=f"http://127.0.0.1:{server.server_port}")
        begun = time.monotonic()
        run = Tracker.open(section, tmp_path, tiny_cohort).parent("slow", "pipeline", "d")
        run.log_epochs([{"epoch": 0, "train_loss": 1.0}])
        run.finish()
        assert time.monotonic() - begun < 120  # seconds; without a limit, PATIENCE_S and more
        over.set()
        server.shutdown()
    assert not run.complete
    assert len([record for record in caplog.records if "run the same command again" in record.getMessage()]) == 1


def test_the_pages_end_with_their_command(store, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "deco_ray.cli", "ui", "--storage", str(store), "--port", str(port)]
    with open(tmp_path / "ui.log", "wb") as log:
        pages = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + PATIENCE_S
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert pages.poll() is None, (tmp_path / "ui.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        assert f"http://127.0.0.1:{port}/" in (tmp_path / "ui.log").read_text()
        pages.terminate()
        assert pages.wait(60) == 0
        check_port("127.0.0.1", port)  # raises while anybody listens
    finally:
        pages.kill()


def write_run(storage: Path, cohort: Cohort, writer: int) -> bool:
    tracker = Tracker.open(TrackingSection(experiment="five writers"), storage, cohort)
    run = tracker.parent(f"writer {writer}", "pipeline", f"d{writer}")
    for epoch in range(10):
        run.log_epochs([{"epoch": epoch, **{f"m{i}": 0.1 * i for i in range(12)}}])
    run.finish()
    return run.complete and not tracker.off


def test_five_processes_write_at_once(store, tiny_cohort):
    with ProcessPoolExecutor(5, mp_context=get_context("spawn")) as pool:
        assert all(pool.map(write_run, [store] * 5, [tiny_cohort] * 5, range(5)))
    tracker = Tracker.open(TrackingSection(experiment="five writers"), store, tiny_cohort)
    for writer in range(5):
        run_id = tracker.parent("again", "pipeline", f"d{writer}").run_id
        points = tracker.call(lambda client, run_id=run_id: client.get_metric_history(run_id, "epochs/m11"))
        assert [point.step for point in points] == list(range(10))
