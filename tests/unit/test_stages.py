"""The stage graph: merging, what is missing, what may start next. No Ray, no training."""

import json

import pandas as pd
import pytest
from pipeline_site import tiny_config

from deco_ray.artefacts import ArtefactStore
from deco_ray.cohort import Cohort
from deco_ray.config import Config, with_settings
from deco_ray.experiments import schedule
from deco_ray.experiments.search import METRIC, SearchFile, conclude, cut_short
from deco_ray.experiments.site import folder_name, note_changed_cohort
from deco_ray.experiments.stages import Progress, StageGraph
from deco_ray.experiments.study import Study


class Fake:
    """A stage as far as the graph cares."""

    def __init__(self, digest, kind="model", needs=(), site="site"):
        self.digest, self.kind, self.needs, self.site, self.title = digest, kind, tuple(needs), site, digest
        self.variant = ""


def chain(seed, *finals):
    judge, table = Fake(f"judge{seed}"), Fake(f"table{seed}", "contributions", [f"judge{seed}"])
    return [judge, table, *(Fake(f"{name}{seed}", needs=[f"table{seed}"]) for name in finals)]


def graph(*stages, results):
    made = StageGraph()
    made.add(stages)
    made.results |= set(results)
    return made


def finish(store, *stages):
    for stage in stages:
        with store.writing(stage.kind, stage.digest, {}):
            pass


def test_shared_stages_are_merged():
    made = graph(*chain(0, "a"), *chain(0, "b"), results=["a0", "b0"])
    assert list(made.stages) == ["judge0", "table0", "a0", "b0"]


def test_only_what_a_result_still_needs_is_missing(tmp_path):
    store = ArtefactStore(tmp_path)
    judge, table, a, b = chain(0, "a", "b")
    made = graph(judge, table, a, b, results=["a0", "b0"])
    assert set(made.missing({"site": store})) == {"judge0", "table0", "a0", "b0"}
    finish(store, judge, table, a)
    assert set(made.missing({"site": store})) == {"b0"}
    finish(store, b)
    assert made.missing({"site": store}) == {}


def test_a_removed_table_is_not_recomputed_while_its_final_model_exists(tmp_path):
    store = ArtefactStore(tmp_path)
    judge, table, a = chain(0, "a")
    finish(store, judge, a)
    assert graph(judge, table, a, results=["a0"]).missing({"site": store}) == {}


def test_seeds_do_not_wait_for_each_other():
    progress = Progress({stage.digest: stage for stage in chain(0, "a") + chain(1, "a")})
    assert [progress.ready().digest, progress.ready().digest] == ["judge0", "judge1"]
    assert progress.ready() is None
    progress.finish("judge1")
    assert progress.ready().digest == "table1"
    progress.finish("table1")
    assert progress.ready().digest == "a1"  # while judge 0 is still running


def test_a_failure_blocks_its_dependants_only():
    progress = Progress({stage.digest: stage for stage in chain(0, "a") + chain(1, "a")})
    progress.ready()
    progress.finish("judge0", "out of luck")
    order = []
    while (stage := progress.ready()) is not None:
        order.append(stage.digest)
        progress.finish(stage.digest)
    assert order == ["judge1", "table1", "a1"]
    assert not progress.unfinished()
    assert list(progress.pending) == ["table0", "a0"]
    assert progress.failed == {"judge0": "out of luck"}


def test_work_that_was_interrupted_is_unfinished():
    progress = Progress({stage.digest: stage for stage in chain(0, "a")})
    assert progress.unfinished()
    progress.ready()
    assert progress.unfinished()


class Died:
    """A Tune trial whose process died, as far as the announcer cares."""

    max_failures = 2

    def __init__(self, digest, recoverable=True):
        self.config, self.recoverable = {"stage": digest}, recoverable

    def should_recover(self):
        return self.recoverable


def announcer_of(progress, stages):
    told = []
    listener = type("Listener", (), {"failed": lambda _, stage, why: told.append((stage.digest, why))})()
    return schedule.Announcer(stages, progress, [listener]), told


def test_a_stage_that_died_between_two_trials_is_next_again_a_few_times():
    stages = {stage.digest: stage for stage in chain(0, "a")}
    progress = Progress(dict(stages))
    announcer, told = announcer_of(progress, stages)
    searcher = schedule.StageSearcher(progress)
    for trial in ("t0", "t1"):
        assert searcher.suggest(trial) == {"stage": "judge0"}
        searcher.on_trial_complete(trial, error=True)
        assert progress.unfinished()
        announcer.on_trial_error(0, [], Died("judge0"))
        assert told == []
    assert searcher.suggest("t2") == {"stage": "judge0"}
    announcer.on_trial_error(0, [], Died("judge0"))
    assert [digest for digest, _ in told] == ["judge0"]
    assert not progress.unfinished()


def test_a_stage_that_tune_restarted_in_vain_has_failed():
    stages = {stage.digest: stage for stage in chain(0, "a")}
    progress = Progress(dict(stages))
    announcer, told = announcer_of(progress, stages)
    progress.ready()
    announcer.on_trial_error(0, [], Died("judge0", recoverable=False))
    assert "died too often" in told[0][1]
    assert list(progress.failed) == ["judge0"]


@pytest.mark.parametrize(("every_s", "sizes"), [(0.0, [1, 1, 1, 1]), (3600.0, [1, 3])])
def test_every_epoch_is_reported_once_and_in_order(monkeypatch, every_s, sizes):
    sent = []
    monkeypatch.setattr(schedule.tune, "report", lambda result: sent.append(result["rows"]))
    reports = schedule.Reports(every_s)
    for epoch in range(4):
        reports({"epoch": epoch})
    reports.send()
    assert [len(rows) for rows in sent] == sizes
    assert [row["epoch"] for rows in sent for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ended", "hours", "seconds", "interrupted"),
    [(3, None, 9, False), (2, None, 9, True), (2, 1.0, 60, True), (2, 1.0, 3601, False), (3, 1.0, 60, False)],
)
def test_a_search_that_ends_early_was_interrupted_unless_its_time_is_up(ended, hours, seconds, interrupted):
    file = SearchFile(kind="search", title="t", trials=3, hours=hours, space={"masking.lam": {"low": 0.0, "high": 1.0}})
    assert cut_short(file, ended, seconds) is interrupted


def test_what_a_search_found_is_written_without_credentials(tmp_path):
    file = SearchFile(kind="search", title="t", space={"masking.lam": {"low": 0.0, "high": 1.0}})
    config = with_settings(Config(), {"cohort": "s3://key:hunter2@bucket/cohort"})
    trials = pd.DataFrame([{"masking.lam": 0.3, METRIC: 0.5, "step": 2, "failure": None}])
    text = conclude(file, config, trials, tmp_path).path.read_text()
    assert "hunter2" not in text
    assert "s3://***@bucket/cohort" in text
    assert "Credentials were left out" in text


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_damaged_note_of_the_cohort_is_as_none(tiny_cohort, tmp_path, damage):
    (tmp_path / "cohort.json").write_text(damage)
    assert note_changed_cohort(tmp_path, tiny_cohort) == []
    assert json.loads((tmp_path / "cohort.json").read_text())["checksum"] == tiny_cohort.checksum
    (tmp_path / "cohort.json").write_text('{"checksum": "another"}')
    assert "changed since results were last written" in note_changed_cohort(tmp_path, tiny_cohort)[0]


def test_the_note_of_the_cohort_keeps_credentials_out(tiny_cohort, tmp_path):
    far = Cohort("s3://AKIA:hunter2@bucket/tiny?region=eu", tiny_cohort.meta, tiny_cohort.slides)
    assert note_changed_cohort(tmp_path, far) == []
    assert json.loads((tmp_path / "cohort.json").read_text())["uri"] == "s3://bucket/tiny"


def test_long_cohort_names_become_short_folder_names_that_differ():
    names = [folder_name("x" * 5000 + end) for end in "ab"]
    assert len(set(names)) == 2
    assert all(len(name) == 100 for name in names)
    assert folder_name("y" * 100) == "y" * 100


@pytest.mark.parametrize(("method", "told"), [("deco", 1), ("abmil", 0)])
def test_a_judge_that_trains_longer_than_the_final_model_is_told_once(tiny_cohort, tmp_path, method, told):
    config = tiny_config(tiny_cohort.uri, tmp_path, method=method)
    study = Study(config)
    study.add(config)
    before = study.warnings
    assert not any("epochs" in note for note in before)
    for lam in (0.2, 0.4):
        study.add(with_settings(config, {"training.epochs": 1, "masking.lam": lam}))
    new = [note for note in study.warnings if note not in before]
    assert len(new) == told
    assert all("the judge trains 2 epochs, the final model 1: " in note for note in new)
    assert all("set judge_training.epochs too" in note for note in new)
