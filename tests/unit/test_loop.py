"""The loop on a tiny cohort, without Ray: judge and final model, resuming, ties, phases."""

import io
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import deco_ray.training.loop as loop
from deco_ray.config import ModelSection, TrainingSection
from deco_ray.errors import ModelError
from deco_ray.keys import generator, torch_seed
from deco_ray.models import Aggregator, Visit, create_model
from deco_ray.training.adam import PlainAdam
from deco_ray.training.checkpoint import CHECKPOINT
from deco_ray.training.phases import Phase, learning_rate
from deco_ray.training.slides import LocalSource, RunSlides
from deco_ray.training.spec import DecoSpec, RunSpec
from deco_ray.training.visits import epoch_visits

OPTIONS = {"hidden": 16, "attention_dim": 8}
K = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source(tiny_cohort):
    return LocalSource.read(tiny_cohort, tiny_cohort.slides["slide_id"])


@pytest.fixture(scope="module")
def slides(tiny_cohort):
    labels = dict(zip(tiny_cohort.slides["slide_id"], tiny_cohort.slides["label"].astype(int)))
    parts = {"train": [], "val": [], "test": []}
    for position, slide in enumerate(labels):
        parts[("train", "train", "val", "test")[position % 4]].append(slide)
    parts["train"] = [slide for slide in parts["train"] if slide not in ("s2_003", "s2_006")]  # 6, 5, 2: a tail
    rng = generator("test assignments")
    sizes = dict(zip(tiny_cohort.slides["slide_id"], tiny_cohort.slides["n_patches"]))
    assignments = {slide: rng.integers(0, K, sizes[slide]).astype(np.int16) for slide in parts["train"]}
    ratios = {slide: rng.uniform(0, 0.5, K) * (labels[slide] > 0) for slide in parts["train"]}
    return RunSlides(**parts, labels=labels, classes=3, assignments=assignments, ratios=ratios)


def make_spec(kind="plain", seed=0, options=OPTIONS, **training):
    settings = {"epochs": 4, "lr": 2e-3, **training}
    deco = DecoSpec(contributions="c", anchors="a") if kind == "deco" else None
    return RunSpec(
        kind=kind,
        cohort="x",
        split="y",
        seed=seed,
        deco=deco,
        model=ModelSection(options=options),
        training=TrainingSection(**settings),
    )


def make_model(spec, dim=16):
    torch.manual_seed(torch_seed(*spec.key("init")))
    return create_model(spec.model.name, dim, 3, **spec.model.options)


def run(spec, slides, source, **keywords):
    return loop.train(make_model(spec), spec, slides, source, **keywords)


def last_weights(spec, slides, source, epochs):
    """The weights after so many epochs of a run, whatever their score."""
    model = make_model(spec)

    def stop(row):
        if row["epoch"] + 1 == epochs:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        loop.train(model, spec, slides, source, report=stop)
    return model.state_dict()


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def without_clocks(history):
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in history]


@pytest.mark.parametrize("kind", ["plain", "deco"])
def test_judge_and_final_learn(kind, slides, source):
    outcome = run(make_spec(kind, epochs=20, lr=1e-2), slides, source)
    losses = [row["main"] for row in outcome.history]
    assert losses[-1] < 0.6 * losses[0]
    assert max(row["val_macro_f1"] for row in outcome.history) > 0.5
    expected = {"main", "loss"} | ({"pseudo", "consistency"} if kind == "deco" else set())
    assert expected <= outcome.history[0].keys()
    if kind == "deco":
        row = outcome.history[0]
        assert row["loss"] == pytest.approx(row["main"] + row["pseudo"] + 0.5 * row["consistency"], rel=1e-5)
        assert row["visits"] > len(slides.train)  # oversampled


@pytest.mark.parametrize("kind", ["plain", "deco"])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_killed_run_resumes_to_the_same_bits(kind, stop_after, slides, source, tmp_path):
    spec = make_spec(kind, options={**OPTIONS, "dropout": 0.3})
    calm = run(spec, slides, source, work=tmp_path / "calm")

    class Killed(Exception):
        pass

    def kill(row):
        if row["epoch"] + 1 == stop_after:
            raise Killed

    with pytest.raises(Killed):
        run(spec, slides, source, work=tmp_path / "killed", report=kill)
    torch.manual_seed(99)  # whatever state the process is in
    resumed = run(spec, slides, source, work=tmp_path / "killed")
    assert_same(calm.state, resumed.state)
    assert without_clocks(calm.history) == without_clocks(resumed.history)
    assert (calm.resumes, resumed.resumes) == (0, 1)


def one_bit_off(data: bytes) -> bytes:
    weights = max(torch.load(io.BytesIO(data), weights_only=True)["model"].values(), key=torch.Tensor.numel)
    at = data.index(weights.numpy().tobytes())
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def without_its_model(data: bytes) -> bytes:
    content = torch.load(io.BytesIO(data), weights_only=True)
    del content["model"]
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], one_bit_off, without_its_model])
def test_a_broken_checkpoint_is_moved_aside(slides, source, tmp_path, caplog, damage):
    spec = make_spec()
    calm = run(spec, slides, source, work=tmp_path)
    path = tmp_path / CHECKPOINT
    path.write_bytes(damage(path.read_bytes()))
    again = run(spec, slides, source, work=tmp_path)
    assert_same(calm.state, again.state)
    assert "starts again" in caplog.text
    assert len(list(tmp_path.glob("broken-*.pt"))) == 1


def test_one_pass_and_four_forwards_train_alike(slides, source, monkeypatch):
    spec = make_spec("deco", epochs=1)
    one = run(spec, slides, source).history[0]

    def four_forwards(self, bag, label, sub_bags=(), **_):
        return Visit(self(bag), torch.stack([self(bag[members]) for members in sub_bags]))

    monkeypatch.setattr(type(make_model(spec)), "visit", four_forwards)
    four = run(spec, slides, source).history[0]
    for term in ("loss", "main", "pseudo", "consistency"):
        assert one[term] == pytest.approx(four[term], abs=1e-5)


def test_the_first_epoch_against_a_plain_loop(slides, source):
    """The loop written out: plan, bag, cross-entropy, Adam."""
    spec = make_spec(epochs=1)
    outcome = run(spec, slides, source)
    model = make_model(spec)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
    losses = []
    for visit in epoch_visits(slides.train, slides.labels, key=(0, "plain", 0)):
        optimiser.zero_grad()
        label = torch.tensor([slides.labels[visit.slide_id]])
        loss = F.cross_entropy(model(source.features[visit.slide_id])[None], label)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert outcome.history[0]["loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    for name, value in model.state_dict().items():
        if name == "score.bias":  # softmax ignores it: its gradient is rounding noise, which Adam blows up
            continue
        torch.testing.assert_close(outcome.state[name], value, atol=1e-6, rtol=1e-5)


def test_adam_takes_torchs_steps_bit_for_bit():
    ends = []
    for kind in (PlainAdam, torch.optim.Adam):
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        optimiser = kind(layer.parameters(), lr=1e-2, weight_decay=1e-3, fused=True)
        for _ in range(5):
            optimiser.zero_grad()
            layer(torch.randn(4, 5)).square().sum().backward()
            optimiser.step()
            optimiser.load_state_dict(optimiser.state_dict())
        ends.append([layer.weight, *optimiser.state[layer.weight].values()])
    assert all(torch.equal(left, right) for left, right in zip(*ends, strict=True))


def test_the_earliest_of_equal_epochs_wins(slides, source, monkeypatch):
    scores = iter([0.5, 0.7, 0.7, 0.6])
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *given: {**real(*given), "macro_f1": next(scores)})
    outcome = run(make_spec(), slides, source)
    assert outcome.best_epoch == 1
    monkeypatch.undo()
    assert_same(outcome.state, last_weights(make_spec(), slides, source, epochs=2))


def test_early_stop_ends_the_run(slides, source, monkeypatch):
    scores = iter([0.5, 0.7, 0.6, 0.6, 0.9])
    real = loop.evaluate
    monkeypatch.setattr(loop, "evaluate", lambda *given: {**real(*given), "macro_f1": next(scores)})
    outcome = run(make_spec(epochs=5, early_stop=2), slides, source)
    assert [row["epoch"] for row in outcome.history] == [0, 1, 2, 3]
    assert outcome.best_epoch == 1


def test_classifier_retraining_leaves_the_representation_alone(slides, source, tmp_path):
    spec = make_spec(epochs=3, retrain_classifier_epochs=3)
    base = run(make_spec(epochs=3), slides, source)
    full = run(spec, slides, source)
    for name in full.state:
        assert torch.equal(base.state[name], full.state[name]) == (not name.startswith("classifier")), name
    assert full.best_epoch >= 3
    assert [row["phase"] for row in full.history] == ["train"] * 3 + ["classifier"] * 3

    def kill(row):
        if row["epoch"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, slides, source, work=tmp_path, report=kill)
    assert_same(full.state, run(spec, slides, source, work=tmp_path).state)


def test_a_class_missing_from_validation_does_not_stop_a_run(slides, source):
    val = [slide for slide in slides.val if slides.labels[slide] != 2]
    fewer = replace(slides, val=val)
    rows = []
    run(make_spec(epochs=1), fewer, source, report=rows.append)
    assert np.isfinite([value for value in rows[0].values() if not isinstance(value, str)]).all()


def test_reports_are_plain_and_finite(slides, source):
    rows = []
    run(make_spec("deco", epochs=2), slides, source, report=rows.append)
    assert [row["epoch"] for row in rows] == [0, 1]
    assert all(type(value) in (int, float, str) for row in rows for value in row.values())
    assert {"loss", "val_macro_f1", "val_tail_f1", "val_auc", "seconds"} <= rows[0].keys()


def test_partner_progress_and_after_step_reach_the_model(slides, source):
    seen = []

    class Paired(Aggregator):
        needs_partner = True

        def __init__(self):
            super().__init__(16, 3)
            self.linear = torch.nn.Linear(16, 3)
            self.steps = 0

        def forward(self, bag):
            return self.linear(bag.mean(0))

        def visit(self, bag, label, sub_bags=(), *, criterion, partner=None, progress=0.0):
            seen.append((int(partner.label), progress))
            return Visit(self(bag), bag.new_zeros(0, 3), extra={"paired": self(partner.bag).square().mean()})

        def after_step(self, progress):
            self.steps += 1

    model = Paired()
    outcome = loop.train(model, make_spec(epochs=2), slides, source)
    assert len(seen) == 2 * len(slides.train) == model.steps
    progress = [value for _, value in seen]
    assert progress == sorted(progress)
    assert progress[0] == 0
    assert progress[-1] < 1
    assert {label for label, _ in seen} == {0, 1, 2}
    assert outcome.history[0]["paired"] > 0


def test_a_diverging_run_says_so(slides, source):
    class Diverging(Aggregator):
        def __init__(self):
            super().__init__(16, 3)
            self.linear = torch.nn.Linear(16, 3)

        def forward(self, bag):
            return self.linear(bag.mean(0)) * torch.inf

    with pytest.raises(ModelError, match=r"training\.lr"):
        loop.train(Diverging(), make_spec(), slides, source)


def test_an_assignment_of_another_cohort_is_refused(slides, source):
    short = {slide: assigned[:-1] for slide, assigned in slides.assignments.items()}
    with pytest.raises(ModelError, match="anchor assignments"):
        run(make_spec("deco"), replace(slides, assignments=short), source)


def test_learning_rates():
    phase = Phase("train", 0, 10)
    cosine = TrainingSection(lr=1.0, epochs=10, schedule="cosine", warmup_epochs=2)
    rates = [learning_rate(cosine, phase, epoch) for epoch in range(10)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(rates[2:]))
    assert learning_rate(TrainingSection(lr=0.1), phase, 7) == 0.1
