"""Artefacts: digests of inputs, whole or absent, and any number of writers."""

import json
import os
import threading

import pytest

from deco_ray.artefacts import ArtefactStore, digest, read_file, write_atomically
from deco_ray.errors import DecoError


@pytest.fixture
def store(tmp_path) -> ArtefactStore:
    return ArtefactStore(tmp_path / "runs" / "cohort")


def write(store, key="k", text="result"):
    with store.writing("model", key, {"lr": 1}) as folder:
        (folder / "model.txt").write_text(text)


def test_a_digest_sees_every_value_and_no_order():
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    inputs = ({"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": None}, {"a": [1]}, {"b": 1}, {"a": 1, "b": 1})
    assert len({digest(value) for value in inputs}) == len(inputs)
    with pytest.raises(ValueError):
        digest({"a": float("nan")})  # NaN equals nothing, so it cannot identify anything


def test_an_artefact_appears_whole_with_its_record(store):
    with store.writing("model", "k", {"lr": 1}, seed=3) as folder:
        (folder / "model.txt").write_text("half")
        assert not store.exists("model", "k")
        assert not store.path("model", "k").exists()
    assert store.exists("model", "k")
    record = store.record("model", "k")
    assert (record["inputs"], record["seed"], record["kind"], record["digest"]) == ({"lr": 1}, 3, "model", "k")
    assert [path.name for path in (store.root / "model").iterdir()] == ["k"]


@pytest.mark.parametrize(
    "error", [ValueError("bug"), KeyboardInterrupt(), PermissionError(13, "denied", "/elsewhere/x")]
)
def test_an_error_leaves_no_artefact_and_keeps_the_work(store, error):
    (store.work("model", "k") / "checkpoint").write_text("epoch 3")

    def fail():
        with store.writing("model", "k", {}) as folder:
            (folder / "model.txt").write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert not store.exists("model", "k")
    assert list((store.root / "model").iterdir()) == []
    assert (store.work("model", "k") / "checkpoint").read_text() == "epoch 3"


def test_finishing_removes_the_work_of_that_artefact_only(store):
    store.work("model", "k"), store.work("model", "other")
    write(store)
    assert [path.name for path in (store.root / "work").iterdir()] == ["model-other"]


def test_of_many_writers_one_wins_and_all_succeed(store):
    gate = threading.Barrier(8)
    errors = []

    def run(number):
        try:
            with store.writing("model", "k", {}) as folder:
                (folder / "a").write_text(str(number))
                (folder / "b").write_text(str(number))
                gate.wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert errors == []
    folder = store.path("model", "k")
    assert (folder / "a").read_text() == (folder / "b").read_text()
    assert [path.name for path in (store.root / "model").iterdir()] == ["k"]


def test_every_file_is_on_the_disk_before_the_artefact_has_its_name(store, monkeypatch):
    flushed = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    with store.writing("model", "k", {}) as folder:
        (folder / "model.txt").write_text("weights")
        (folder / "figures").mkdir()
        (folder / "figures" / "a.png").write_bytes(b"picture")
    files = [path for path in store.path("model", "k").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_ino for path in files} <= flushed


def test_an_error_does_not_count_when_another_process_has_made_the_artefact(store):
    with pytest.raises(FileNotFoundError), store.unless_made("model", "k"):
        raise FileNotFoundError("the work folder is gone")
    with store.unless_made("model", "k"):
        with store.writing("model", "k", {}):
            pass
        raise FileNotFoundError("the work folder is gone")
    with pytest.raises(KeyboardInterrupt), store.unless_made("model", "k"):
        raise KeyboardInterrupt


def test_a_finished_artefact_is_not_replaced(store):
    write(store, text="first")
    write(store, text="second")
    assert (store.path("model", "k") / "model.txt").read_text() == "first"


def test_a_store_that_cannot_be_written_names_it_and_the_remedy(tmp_path, monkeypatch):
    def denied(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "mkdir", denied)  # permissions do not bind root, who may run the tests
    store = ArtefactStore(tmp_path / "runs" / "readonly")
    with (
        pytest.raises(DecoError, match=r"readonly: Permission denied; make room there or set `storage`"),
        store.writing("model", "k", {}),
    ):
        pass
    with pytest.raises(DecoError, match="set `storage`"):
        store.work("model", "k")


def test_a_full_disk_a_file_in_the_way_and_a_read_only_disk_are_explained(tmp_path, monkeypatch):
    full = ArtefactStore(tmp_path / "full")
    with pytest.raises(DecoError, match="No space left"), full.writing("model", "k", {}):
        raise OSError(28, "No space left on device")
    assert list((full.root / "model").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(DecoError, match="set `storage`"), ArtefactStore(tmp_path / "file").writing("model", "k", {}):
        pass

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", read_only)
    with (
        pytest.raises(DecoError, match="Read-only file system"),
        ArtefactStore(tmp_path / "x").writing("model", "k", {}),
    ):
        pass


@pytest.mark.parametrize("damaged", ["{", "[]", "{}", '{"inputs": []}', '{"inputs": {}, "files": 3}'])
def test_a_damaged_record_is_explained(store, damaged):
    write(store)
    (store.path("model", "k") / "artefact.json").write_text(damaged)
    with pytest.raises(DecoError, match=r"artefact.json.*remove"):
        store.record("model", "k")


def test_a_file_that_is_not_what_was_written_is_noticed(store, tmp_path):
    write(store, text="result")
    path = store.path("model", "k") / "model.txt"
    assert read_file(path) == b"result"
    for changed in (b"resulu", b"result ", b""):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match="not what was written"):
            read_file(path)
    (tmp_path / "alone.txt").write_text("somebody's own")
    assert read_file(tmp_path / "alone.txt") == b"somebody's own"


def test_an_artefact_is_whole_with_all_its_files(store):
    assert not store.is_whole("report", "k")
    with store.writing("report", "k", {}) as folder:
        (folder / "figures").mkdir()
        for name in ("report.html", "figures/a.png"):
            (folder / name).write_text(name)
    assert store.is_whole("report", "k")
    (store.path("report", "k") / "figures" / "a.png").unlink()
    assert not store.is_whole("report", "k")
    assert store.exists("report", "k")


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "x.json"
    write_atomically(path, "old")
    write_atomically(path, json.dumps({"a": 1}).encode())
    assert path.read_text() == '{"a": 1}'

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == '{"a": 1}'
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]
