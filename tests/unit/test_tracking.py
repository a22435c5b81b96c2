"""Tracking is a projection of what is on disk: repeating it changes nothing, losing it costs nothing."""

from __future__ import annotations

import fcntl
import json
import logging
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fabricated_run import CLASSES, write_run_artefact

import deco_ray
from deco_ray.artefacts import ArtefactStore
from deco_ray.config import ModelSection, TrackingSection, TrainingSection
from deco_ray.errors import ConfigError, DecoError
from deco_ray.experiments.recorder import Recorder
from deco_ray.experiments.stages import StageGraph, TrainStage
from deco_ray.models import create_model, model_names
from deco_ray.results import tracking, tracking_lock
from deco_ray.results.mlflow_model import ServedModel, save
from deco_ray.results.tracking import Tracker, create_database, git_commit
from deco_ray.results.tracking_artefact import named_metrics
from deco_ray.results.tracking_lookup import look_up, look_up_sqlite
from deco_ray.results.tracking_run import RunHandle
from deco_ray.results.ui import server_command
from deco_ray.training.spec import RunSpec


@pytest.fixture(scope="session")
def store(tmp_path_factory) -> Path:
    """One storage folder for all tests: creating MLflow's tables takes seconds. Tests differ by experiment."""
    return tmp_path_factory.mktemp("tracked runs")  # with a space, as storage folders may have


@pytest.fixture
def open_tracker(store, tiny_cohort, request):
    """Opens trackers on the test's own experiment, each as a new command would."""

    def open_one(**settings) -> Tracker:
        section = TrackingSection(**{"experiment": request.node.name, **settings})
        return Tracker.open(section, store, tiny_cohort)

    return open_one


def runs_of(tracker: Tracker) -> list:
    return tracker.call(lambda client: list(client.search_runs([tracker.experiment_id])))


def files_of(tracker: Tracker, run_id: str | None, folder: str) -> list[str]:
    return [file.path for file in tracker.call(lambda client: client.list_artifacts(run_id, folder))]


def curve(tracker: Tracker, run_id: str, name: str) -> list[int]:
    return [point.step for point in tracker.call(lambda client: client.get_metric_history(run_id, f"epochs/{name}"))]


def test_a_repeated_command_finds_its_runs_again(open_tracker):
    first = open_tracker()
    parent = first.parent("pipeline", "pipeline", "d0", {"k": 64}, {"purpose": "test"})
    child = first.child(parent, "judge s0", "d1", {"seed": 0})
    assert first.child(parent, "judge s0", "d1").run_id == child.run_id
    parent.finish("FAILED")

    again = open_tracker()
    same_parent = again.parent("pipeline", "pipeline", "d0", {"k": 64})
    assert same_parent.run_id == parent.run_id
    assert again.child(same_parent, "judge s0", "d1").run_id == child.run_id
    assert again.parent("sweep", "sweep", "d0").run_id != parent.run_id  # a digest of another kind

    runs = {run.info.run_id: run for run in runs_of(again)}
    assert len(runs) == 3
    assert runs[child.run_id].data.tags["mlflow.parentRunId"] == parent.run_id
    same_parent.log_metrics({"x": 1.0})
    assert {run.info.run_id: run for run in runs_of(again)}[parent.run_id].info.status == "RUNNING"


def test_runs_say_where_they_come_from(open_tracker, tiny_cohort):
    tracker = open_tracker()
    run_id = tracker.parent("pipeline", "pipeline", "d0", {}, {"purpose": "test"}).run_id
    run = tracker.call(lambda client: client.get_run(run_id))
    expected = {
        "deco.digest": "d0",
        "deco.dataset_checksum": tiny_cohort.checksum,
        "deco.version": deco_ray.__version__,
        "purpose": "test",
    }
    assert expected.items() <= run.data.tags.items()
    assert run.inputs.dataset_inputs[0].dataset.name == tiny_cohort.name


def test_the_commit_is_that_of_the_checkout(tmp_path):
    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "__init__.py").touch()
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "__init__.py").touch()
    git("init")
    git("add", "ours")
    git("commit", "-m", "first")
    assert git_commit(tmp_path / "ours") == git("rev-parse", "HEAD").strip()
    assert git_commit(tmp_path / "installed") is None  # somebody else's repository around a virtual environment


def test_a_resumed_curve_goes_on_and_never_doubles(open_tracker):
    rows = [{"epoch": epoch, "loss": 1 / (1 + epoch), "auc": float("nan"), "f1": None} for epoch in range(9)]
    live = open_tracker()
    child = live.child(live.parent("p", "pipeline", "d0"), "judge", "d1")
    for row in rows[:4]:
        child.log_epochs([row])

    resumed = open_tracker()
    child = resumed.child(resumed.parent("p", "pipeline", "d0"), "judge", "d1")
    child.log_epochs(rows[2:6])  # the resumed run repeats an epoch or two
    child.log_epochs(pd.DataFrame(rows))
    assert curve(resumed, child.run_id, "loss") == list(range(9))
    assert curve(resumed, child.run_id, "auc") == []


@pytest.fixture(params=["a SQLite file", "a server"])
def open_driver(open_tracker, request):
    """Opens trackers that look into the SQLite file, or ask MLflow alone, as of a server's store."""

    def open_one() -> Tracker:
        tracker = open_tracker()
        if request.param == "a server":
            tracker.database = None
        return tracker

    return open_one


def test_two_drivers_that_start_at_once_share_their_runs(open_driver, open_tracker):
    def driver(_):
        tracker = open_driver()
        parent = tracker.parent("p", "pipeline", "d0", {"k": 1})
        return parent.run_id, [tracker.child(parent, f"s{seed}", f"c{seed}").run_id for seed in range(3)]

    with ThreadPoolExecutor(2) as both:
        first, second = both.map(driver, range(2))
    assert first == second
    assert len(runs_of(open_tracker())) == 4


def test_two_drivers_that_resume_a_run_at_once_log_each_point_once(open_driver):
    rows = [{"epoch": epoch, "loss": 1 / (1 + epoch)} for epoch in range(8)]

    def driver():
        tracker = open_driver()
        return tracker.child(tracker.parent("p", "pipeline", "d0"), "judge", "d1")

    driver().log_epochs(rows[:1])
    drivers = [driver(), driver()]
    with ThreadPoolExecutor(2) as both:
        for row in rows:
            list(both.map(RunHandle.log_epochs, drivers, [[row], [row]]))
        list(both.map(RunHandle.log_metrics, drivers, [{"test": {"acc": 0.5}}] * 2))
    tracker, run_id = drivers[0].tracker, drivers[0].run_id
    assert curve(tracker, run_id, "loss") == list(range(8))
    assert len(tracker.call(lambda client: client.get_metric_history(run_id, "test/acc"))) == 1


def test_a_driver_that_never_lets_go_costs_one_warning(open_tracker, monkeypatch, caplog):
    """As one that was suspended by Ctrl-Z while it logged."""
    monkeypatch.setattr(tracking_lock, "LOCK_TIMEOUT_S", 0.2)
    run = open_tracker().parent("p", "pipeline", "d0")
    other = open_tracker()
    with open(other.lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run.log_metrics({"acc": 0.5})
        parent = other.parent("p", "pipeline", "d0")
        other.child(parent, "judge", "d1").log_metrics({"acc": 0.5})
    assert run.tracker.off
    assert other.off
    warnings = [record.getMessage() for record in caplog.records if "tracking is off" in record.getMessage()]
    assert len(warnings) == 2  # one a driver
    assert all(f"held {other.lock} for 0.2 s" in warning for warning in warnings)


def test_epochs_lost_with_a_killed_driver_are_made_up_for(open_tracker):
    """Live reports after a gap are held back: written, they would keep the missing epochs out for good."""
    rows = [{"epoch": epoch, "loss": 1.0} for epoch in range(5)]
    tracker = open_tracker()
    child = tracker.child(tracker.parent("p", "pipeline", "gap"), "final", "gap1")
    child.log_epochs([rows[0]])
    child.log_epochs([rows[3]])
    assert curve(tracker, child.run_id, "loss") == [0]
    child.log_epochs(rows)
    assert curve(tracker, child.run_id, "loss") == list(range(5))


def test_columns_that_live_reports_left_out_are_filled_in(open_tracker):
    tracker = open_tracker()
    run = tracker.parent("p", "pipeline", "d0")
    for epoch in range(3):
        run.log_epochs([{"epoch": epoch, "loss": 1.0}])
    rows = [{"epoch": epoch, "loss": 1.0, "seconds": 0.1, "auc": None if epoch < 2 else 0.7} for epoch in range(5)]
    again = open_tracker().parent("p", "pipeline", "d0")
    for _ in range(2):
        again.log_epochs(rows)
    assert curve(tracker, run.run_id, "loss") == [0, 1, 2, 3, 4]
    assert curve(tracker, run.run_id, "seconds") == [0, 1, 2, 3, 4]
    assert curve(tracker, run.run_id, "auc") == [2, 3, 4]


def test_a_damaged_artefact_is_named_and_skipped(open_tracker, tmp_path, caplog):
    folder = write_run_artefact(tmp_path / "run")
    (folder / "metrics.json").write_text("{")
    tracker = open_tracker()
    child = tracker.child(tracker.parent("p", "pipeline", "d0"), "final s0", "d1")
    child.log_run_artefact(folder)
    assert not child.complete
    assert not tracker.off
    assert "final s0 is not logged" in caplog.text


def test_only_what_was_logged_counts_as_complete(open_tracker, tmp_path):
    store = ArtefactStore(tmp_path)
    spec = RunSpec(kind="plain", cohort="c", split="s", seed=0, model=ModelSection(), training=TrainingSection())
    graph = StageGraph()
    graph.add([TrainStage("d1", "final s0", spec)])
    folder = write_run_artefact(store.path("model", "d1"))
    whole = (folder / "metrics.json").read_text()

    def command() -> tuple[str, bool]:
        tracker = open_tracker()
        parent = tracker.parent("p", "pipeline", "d0")
        recorder = Recorder(tracker, parent, {"s": SimpleNamespace(store=store)})
        recorder.catch_up(graph, {})
        recorder.close()
        run = tracker.call(lambda client: client.get_run(parent.children["d1"].run_id))
        return run.info.status, "deco.logged" in run.data.tags

    (folder / "metrics.json").write_text(whole[:9])
    assert command() == ("FAILED", False)
    (folder / "metrics.json").write_text(whole)
    assert command() == ("FINISHED", True)


class TablesMadeBy:
    """Stands for MLflow's client, whose making of tables takes seconds."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def __call__(self, tracking_uri: str) -> TablesMadeBy:
        Path(tracking_uri.removeprefix("sqlite:///")).write_text("ours")
        return self

    def search_experiments(self, **_) -> None:
        self.meanwhile()


def test_a_store_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    def killed():
        raise KeyboardInterrupt

    monkeypatch.setattr("mlflow.MlflowClient", TablesMadeBy(killed))
    with pytest.raises(KeyboardInterrupt):
        create_database(tmp_path / "mlflow.db")
    assert not list(tmp_path.iterdir())


def test_a_store_somebody_made_meanwhile_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("mlflow.MlflowClient", TablesMadeBy(lambda: (tmp_path / "mlflow.db").write_text("theirs")))
    create_database(tmp_path / "mlflow.db")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["theirs"]


def test_long_curves_and_many_parameters_go_in_batches(open_tracker):
    tracker = open_tracker()
    run = tracker.parent("p", "pipeline", "d0", {f"p{i}": "x" * 7000 for i in range(230)})
    run.log_epochs([{"epoch": epoch, **{f"m{i}": 0.5 for i in range(40)}} for epoch in range(60)])
    assert curve(tracker, run.run_id, "m39") == list(range(60))
    assert len(tracker.call(lambda client: client.get_run(run.run_id)).data.params) == 230
    assert not tracker.off


def test_a_parameter_that_changed_is_no_error(open_tracker):
    tracker = open_tracker()
    tracker.parent("p", "pipeline", "d0", {"storage": "a"})
    again = open_tracker()
    run = again.parent("p", "pipeline", "d0", {"storage": "b", "new": {"nested": 1}})
    params = again.call(lambda client: client.get_run(run.run_id)).data.params
    assert params == {"storage": "a", "new.nested": "1"}


def test_a_finished_run_is_logged_whole(open_tracker, tmp_path):
    folder = write_run_artefact(tmp_path / "run")
    tracker = open_tracker()
    child = tracker.child(tracker.parent("p", "pipeline", "d0"), "final s0", "d1")
    child.log_run_artefact(folder, {"lam": 0.6}, {"deco.stage": "final"})
    run = tracker.call(lambda client: client.get_run(child.run_id))

    assert run.info.status == "FINISHED"
    assert run.data.params.items() >= {"lam": "0.6", "model.name": "abmil", "model.seed": "0"}.items()
    test = json.loads((folder / "metrics.json").read_text())["test"]
    assert run.data.metrics["test/macro_f1"] == pytest.approx(test["macro_f1"])
    assert run.data.metrics["test/f1 high grade"] == pytest.approx(test["f1_per_class"][2])
    assert curve(tracker, child.run_id, "train_loss") == [0, 1, 2, 3]
    assert files_of(tracker, child.run_id, "figures") == ["figures/confusion_test.png"]
    assert files_of(tracker, child.run_id, "tables") == ["tables/predictions.csv"]


def test_the_logged_model_predicts_what_the_weights_predict(open_tracker, tmp_path):
    import mlflow

    folder = write_run_artefact(tmp_path / "run")
    tracker = open_tracker()
    child = tracker.child(tracker.parent("p", "pipeline", "d0"), "final s0", "d1")
    # an attempt that was killed while it logged the model
    stale = tracker.call(lambda client: client.create_logged_model(tracker.experiment_id, "model", child.run_id))
    child.log_run_artefact(folder)

    models = tracker.call(lambda client: client.search_logged_models([tracker.experiment_id]))
    assert [model.source_run_id for model in models] == [child.run_id]
    assert models[0].model_id != stale.model_id

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(tracker.uri)
    try:
        served = [mlflow.pyfunc.load_model(uri) for uri in (f"runs:/{child.run_id}/model", models[0].model_uri)]
    finally:
        mlflow.set_tracking_uri(before)
    bag = torch.randn(7, 16)
    model = create_model("abmil", 16, 3)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    expected = model.eval()(torch.nn.functional.normalize(bag)).softmax(-1).detach().numpy()
    for loaded in served:
        np.testing.assert_allclose(loaded.predict(bag.numpy()), expected, rtol=1e-5)
        assert loaded.metadata.metadata["classes"] == list(CLASSES)
    for bad in (np.zeros((3, 16), np.float32), np.full((2, 16), np.nan, np.float32), np.zeros((0, 16), np.float32)):
        with pytest.raises(DecoError, match="bag"):
            served[0].predict(bad)


@pytest.mark.parametrize("name", model_names())
def test_every_architecture_is_saved_and_answers(tmp_path, name):
    import mlflow.pyfunc

    save(write_run_artefact(tmp_path / "run", name=name, dim=32), tmp_path / "saved", "r", "m")
    answer = mlflow.pyfunc.load_model(str(tmp_path / "saved")).predict(np.ones((5, 32), np.float32))
    assert answer.shape == (len(CLASSES),)
    assert answer.sum() == pytest.approx(1)


def test_a_served_model_corrects_for_class_frequency_as_its_run_did(tmp_path):
    bag = np.ones((5, 16), np.float32)
    plain = ServedModel(write_run_artefact(tmp_path / "plain")).predict(bag)
    adjusted = ServedModel(write_run_artefact(tmp_path / "adjusted", post_hoc_tau=1.0)).predict(bag)
    expected = plain / np.array([9, 5, 2])  # softmax(logits - log prior)
    np.testing.assert_allclose(adjusted, expected / expected.sum(), rtol=1e-5)


def test_a_second_submit_does_not_even_connect(open_tracker, tmp_path):
    folders = [write_run_artefact(tmp_path / f"run{seed}", seed) for seed in range(3)]

    def submit() -> Tracker:
        tracker = open_tracker()
        parent = tracker.parent("p", "pipeline", "d0", {"k": 1}, {"a": "b"})
        for seed, folder in enumerate(folders):
            tracker.child(parent, f"final s{seed}", f"c{seed}", {"seed": seed}).log_run_artefact(folder)
        parent.log_metrics({"mean": 0.5})
        parent.log_table(pd.DataFrame({"a": [1]}), "summary")
        parent.finish()
        return tracker

    tracker = submit()
    before = [(run.info.end_time, run.data) for run in runs_of(tracker)]
    again = submit()
    assert again._client is None  # nothing was imported, opened or asked
    assert not again.off
    assert [run.info.end_time for run in runs_of(again)] == [end for end, _ in before]


def test_both_ways_of_looking_up_agree(open_tracker):
    tracker = open_tracker()
    parent = tracker.parent("p", "pipeline", "d0")
    for seed in range(3):
        tracker.child(parent, f"s{seed}", f"c{seed}").set_tags({"seed": seed})
    deleted = tracker.child(parent, "gone", "c9")
    tracker.call(lambda client: client.delete_run(deleted.run_id))

    database = Path(tracker.uri.removeprefix("sqlite:///"))
    direct = look_up_sqlite(database, tracker.experiment, "pipeline", "d0")
    searched = tracker.call(lambda client: look_up(client, tracker.experiment_id, "pipeline", "d0"))
    assert direct == searched
    assert sorted(direct.children) == ["c0", "c1", "c2"]
    assert look_up_sqlite(database, tracker.experiment, "pipeline", "other") is None
    assert tracker.call(lambda client: look_up(client, tracker.experiment_id, "pipeline", "other")) is None


@pytest.mark.parametrize("listening", [False, True], ids=["refused", "silent"])
def test_a_server_that_is_down_costs_one_warning(open_tracker, caplog, monkeypatch, tmp_path, listening):
    monkeypatch.setattr(tracking, "PROBE_TIMEOUT_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()  # accepts, and never answers
        started = time.perf_counter()
        tracker = open_tracker(uri=f"http://ada:hunter2@127.0.0.1:{server.getsockname()[1]}")
        parent = tracker.parent("p", "pipeline", "d0", {"k": 1})
        child = tracker.child(parent, "judge", "d1")
        child.log_epochs([{"epoch": 0, "loss": 1.0}])
        child.log_run_artefact(write_run_artefact(tmp_path / "run"))
        parent.finish()
        assert time.perf_counter() - started < 30  # two probes of half a second
    assert not child.complete
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "run the same command again" in warnings[0]
    assert "hunter2" not in warnings[0]


def test_what_an_outage_left_out_is_logged_next_time(open_tracker, tmp_path, monkeypatch, caplog):
    folder = write_run_artefact(tmp_path / "run", epochs=6)
    history = pd.read_parquet(folder / "history.parquet")
    tracker = open_tracker()
    child = tracker.child(tracker.parent("p", "pipeline", "d0"), "final", "d1")
    child.log_epochs(history[:3])
    with monkeypatch.context() as outage:
        outage.setattr(
            type(tracker._client), "log_batch", lambda *_, **__: (_ for _ in ()).throw(OSError("disk is full"))
        )
        child.log_epochs(history[:4])
        child.log_run_artefact(folder)
    assert tracker.off
    assert sum("disk is full" in record.getMessage() for record in caplog.records) == 1

    again = open_tracker()
    child = again.child(again.parent("p", "pipeline", "d0"), "final", "d1")
    assert not child.complete
    child.log_run_artefact(folder)
    assert child.complete
    assert curve(again, child.run_id, "train_loss") == list(range(6))


def test_system_metrics_are_watched_until_the_run_ends(open_tracker, caplog):
    tracker = open_tracker(system_metrics=True)
    parent = tracker.parent("p", "pipeline", "d0")
    watching = [thread.name for thread in threading.enumerate()]
    parent.finish()
    assert not tracker.off, caplog.text
    assert "SystemMetricsMonitor" in watching
    assert "SystemMetricsMonitor" not in [thread.name for thread in threading.enumerate()]


def test_disabled_tracking_writes_nothing(open_tracker, store, tmp_path, caplog):
    tracker = open_tracker(enabled=False)
    parent = tracker.parent("p", "pipeline", "d0", {"k": 1})
    tracker.child(parent, "judge", "d1").log_run_artefact(write_run_artefact(tmp_path / "run"))
    parent.finish()
    assert look_up_sqlite(store / "mlflow.db", tracker.experiment, "pipeline", "d0") is None
    assert not caplog.records


def test_no_credential_reaches_the_store(open_tracker, store):
    tracker = open_tracker()
    settings = {"tracking": {"uri": "http://ada:hunter2@host"}, "cohort": "s3://KEY:hunter2@bucket/x"}
    run = tracker.parent("p", "pipeline", "d0", settings, {"link": "https://host/?token=hunter2"})
    run.log_config(settings)
    run.describe("see http://ada:hunter2@host/report")
    run.finish()
    stored = tracker.call(lambda client: client.get_run(run.run_id))
    assert len(stored.data.params) == 2
    assert "hunter2" not in str(stored.to_dictionary())
    written = Path(tracker.call(lambda client: client.download_artifacts(run.run_id, "config.yaml"))).read_text()
    assert "bucket/x" in written
    assert "hunter2" not in written


def test_a_deleted_experiment_is_named(open_tracker, caplog):
    tracker = open_tracker()
    tracker.parent("p", "pipeline", "d0")
    tracker.call(lambda client: client.delete_experiment(tracker.experiment_id))
    open_tracker().parent("p", "pipeline", "d0")
    assert "was deleted; restore it" in caplog.text


def test_a_figure_may_be_a_file(open_tracker, tmp_path):
    (tmp_path / "plot.svg").write_text("<svg/>")
    tracker = open_tracker()
    run = tracker.parent("p", "pipeline", "d0")
    run.log_figure(tmp_path / "plot.svg", "groups")
    run.log_file(tmp_path / "plot.svg", "report")
    assert files_of(tracker, run.run_id, "figures") == ["figures/groups.svg"]
    assert files_of(tracker, run.run_id, "report") == ["report/plot.svg"]


def test_per_class_metrics_carry_the_class_name():
    metrics = {"test": {"acc": 0.5, "f1_per_class": [0.1, None]}, "best_epoch": 3}
    assert named_metrics(metrics, ("a", "b")) == {"test/acc": 0.5, "test/f1 a": 0.1, "test/f1 b": None, "best_epoch": 3}


@pytest.mark.parametrize("uri", ["runs/mlflow.db", "file:///runs", "sqlite:///relative.db", "sqlite://"])
def test_a_useless_uri_is_refused_at_once(open_tracker, uri):
    with pytest.raises(ConfigError, match=r"tracking\.uri"):
        open_tracker(uri=uri)


def test_the_pages_need_runs_and_a_free_port(tmp_path):
    with pytest.raises(DecoError, match="no tracked runs"):
        server_command(tmp_path)
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DecoError, match=f"--port {port + 1}"):
            server_command(tmp_path, port=port)
    assert f"sqlite:///{tmp_path}/mlflow.db" in server_command(tmp_path, port=port)
    for port in (-1, 0, 65536, 99999):
        with pytest.raises(DecoError, match=f"^there is no port {port}; choose one from 1 to 65535 with --port$"):
            server_command(tmp_path, port=port)
