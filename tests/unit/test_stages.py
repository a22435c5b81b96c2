"""The stage graph: merging, what is missing, what may start next. No Ray, no training."""

import pytest

from deco_ray.artefacts import ArtefactStore
from deco_ray.experiments import schedule
from deco_ray.experiments.stages import Progress, StageGraph


class Fake:
    """A stage as far as the graph cares."""

    def __init__(self, digest, kind="model", needs=(), site="site"):
        self.digest, self.kind, self.needs, self.site, self.title = digest, kind, tuple(needs), site, digest


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
