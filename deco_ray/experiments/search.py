"""Search on a new dataset: Optuna proposes, ASHA stops early, validation macro-F1 decides; test is never looked at.

Keys that change the anchors must be given as lists of values: their anchors are fitted before the trials start,
because fitting needs CPUs that the trials would hold.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import pandas as pd
import yaml
from pydantic import Field, model_validator
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from deco_ray.artefacts import digest, owner, write_atomically
from deco_ray.config import Config, Section, build, load_config, read_file, with_settings
from deco_ray.errors import StageError
from deco_ray.experiments.board import Board
from deco_ray.experiments.methods import expand
from deco_ray.experiments.schedule import Workplace, describe, make, placement
from deco_ray.experiments.session import connect
from deco_ray.experiments.stages import Stage, TrainStage
from deco_ray.experiments.study import Study
from deco_ray.results.redact import redact_tree

METRIC = "val_macro_f1"
ANCHOR_KEYS = ("anchors.", "split.", "cohort")


class Dimension(Section):
    """What a key may be: a list of values, or a range (log: sampled on a log scale)."""

    values: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    log: bool = False

    @model_validator(mode="after")
    def _values_or_range(self) -> Dimension:
        if bool(self.values) == (self.low is not None and self.high is not None):
            raise ValueError("give either values, or low and high")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        return self

    def domain(self) -> Any:
        if self.low is None or self.high is None:
            return tune.choice(list(self.values))
        return (tune.loguniform if self.log else tune.uniform)(self.low, self.high)


class SearchFile(Section):
    kind: Literal["search"]
    title: str
    base: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    space: dict[str, Dimension] = Field(min_length=1, description="any keys of the configuration")
    trials: int = Field(50, ge=1)
    hours: float | None = Field(None, gt=0, description="stop proposing after this long")
    seeds: tuple[int, ...] = (0,)
    grace_epochs: int = Field(5, ge=1, description="epochs every trial gets before ASHA may stop it")

    @model_validator(mode="after")
    def _anchors_are_listed(self) -> SearchFile:
        for key, dimension in self.space.items():
            if key.startswith(ANCHOR_KEYS) and not dimension.values:
                raise ValueError(f"{key} changes the anchors: list its values, ranges cannot be prepared beforehand")
        return self


@dataclass(frozen=True)
class Found:
    """The best trial, all trials, and where the best configuration was written."""

    best: dict[str, Any]
    score: float
    trials: pd.DataFrame
    path: Path
    failed: int


def load_search(path: str | Path, base: str | None, overrides: tuple[str, ...]) -> tuple[SearchFile, Config]:
    file: SearchFile = build(SearchFile, read_file(path, "sweep"), str(path))
    named = base or (str(Path(path).parent / file.base) if file.base else None)
    config = with_settings(load_config(named, overrides), {**file.settings, "seeds": list(file.seeds)})
    for key, dimension in file.space.items():  # a wrong key or range is told before anything runs
        for value in dimension.values or (dimension.low, dimension.high):
            with_settings(config, {key: value})
    return file, config


def run_search(file: SearchFile, config: Config, board: Board) -> Found:
    study = Study(config)
    prepare(file, study, board)
    for note in study.warnings:
        board.say(f"note: {note}")
    site = study.site(config)
    key = digest({"search": file.model_dump(mode="json"), "split": site.split.digest})
    work = site.store.root / "work" / f"tune-{owner()}"  # swept by a later run, should this one be killed
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # trials are told by the board
    place = Workplace({}, study.sites, study.sources(set(study.sites), board), config.resources)
    stage = next(stage for stage in study.graph if isinstance(stage, TrainStage))
    teller = Teller(board)
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(try_settings, config=config, place=place), placement(stage, config.resources)
        ),
        param_space={name: dimension.domain() for name, dimension in file.space.items()},
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=file.trials,
            time_budget_s=file.hours * 3600 if file.hours else None,
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(
                time_attr="step", grace_period=file.grace_epochs, max_t=config.training.epochs * len(file.seeds)
            ),
            max_concurrent_trials=config.resources.max_concurrent,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="search",
            storage_path=str(work),
            verbose=0,
            callbacks=[teller],
            failure_config=tune.FailureConfig(max_failures=config.resources.max_failures),
        ),
    )
    begun = time.monotonic()
    try:
        grid = tuner.fit()
        trials = pd.DataFrame([trial_row(grid[number], file) for number in range(len(grid))])
    finally:
        shutil.rmtree(work, ignore_errors=True)
    folder = site.store.root / "searches" / key
    if cut_short(file, teller.count + grid.num_errors, time.monotonic() - begun):
        so_far = f"; the best so far: {conclude(file, config, trials, folder).path}" if teller.count else ""
        board.say(f"interrupted after {teller.count} of {file.trials} trials{so_far}")
        raise KeyboardInterrupt
    return conclude(file, config, trials, folder)


def cut_short(file: SearchFile, ended: int, seconds: float) -> bool:
    """Whether trials are missing that neither failed nor ran out of time: Tune takes Ctrl-C and returns as if done."""
    return ended < file.trials and (file.hours is None or seconds < file.hours * 3600)


def prepare(file: SearchFile, study: Study, board: Board) -> None:
    """Open every split and fit every set of anchors that a trial can ask for, and the base's judges on the way."""
    listed = {key: dimension.values for key, dimension in file.space.items() if key.startswith(ANCHOR_KEYS)}
    for values in itertools.product(*listed.values()):
        study.add(with_settings(study.base, dict(zip(listed, values))))
    connect(study.base.resources)
    study.make_anchors(set(study.anchors), board)


def try_settings(sample: dict[str, Any], config: Config, place: Workplace) -> None:
    """A trial: the chain of every seed with these settings; each epoch reports the mean over seeds so far."""
    best: list[float] = []
    step = 0
    try:
        member = with_settings(config, sample)
        site = next(site for site in place.sites.values() if matches(site, member))
        runs, stages = expand(member, site.cohort, site.split)
        answers = {run.model for run in runs}
        for stage in stages:
            scores: list[float] = []

            def report(metrics: dict[str, Any], stage: Stage = stage, scores: list[float] = scores) -> None:
                nonlocal step
                if stage.digest in answers and METRIC in metrics:
                    scores.append(metrics[METRIC])
                    step += 1
                    current = [*best, max(scores)]
                    tune.report({METRIC: sum(current) / len(current), "step": step})

            make(stage, place, report)
            if stage.digest in answers:
                best.append(final_score(stage, place))
    except Exception as error:
        tune.report({METRIC: -1.0, "step": step + 1, "failure": describe(error)})
        return
    tune.report({METRIC: sum(best) / len(best), "step": config.training.epochs * len(config.seeds)})


def matches(site: Any, member: Config) -> bool:
    from deco_ray.cohort.splits import resolve_split

    return site.cohort.uri == member.cohort and resolve_split(site.cohort, member.split).digest == site.split.digest


def final_score(stage: Stage, place: Workplace) -> float:
    """Validation macro-F1 of the best epoch, from disk: also of runs that were there already."""
    from deco_ray.results.run_files import read_metrics

    return float(read_metrics(place.sites[stage.site].store.path("model", stage.digest))["val"]["macro_f1"])


def trial_row(result: Any, file: SearchFile) -> dict[str, Any]:
    metrics = result.metrics or {}
    row = {key: (result.config or {}).get(key) for key in file.space}
    return row | {METRIC: metrics.get(METRIC, -1.0), "step": metrics.get("step", 0), "failure": metrics.get("failure")}


def conclude(file: SearchFile, config: Config, trials: pd.DataFrame, folder: Path) -> Found:
    good = trials[trials["failure"].isna() & (trials[METRIC] >= 0)] if len(trials) else trials
    if not len(good):
        cause = (
            trials["failure"].dropna().iloc[0] if len(trials) and trials["failure"].notna().any() else "no trial ran"
        )
        raise StageError(f"no trial of the search finished: {cause}")
    row = good.sort_values(METRIC, ascending=False, kind="stable").iloc[0]
    best = {key: plain(row[key]) for key in file.space}
    chosen = with_settings(config, {**best, "seeds": list(Config().seeds)})
    score = f"validation macro-F1 {100 * row[METRIC]:.2f} % (test not looked at)"
    head = f"# {file.title}: best of {len(trials)} trials, {score}\n"
    head += "# Command: ray job submit -- python jobs/full_pipeline.py --config <this file>\n"
    tree = differences(chosen.model_dump(mode="json"), Config().model_dump(mode="json"))
    if (clean := redact_tree(tree)) != tree:
        head += "# Credentials were left out: put them back where *** stands, or set them in the environment\n"
    path = folder / "best.yaml"
    write_atomically(path, head + yaml.safe_dump(clean, sort_keys=False, allow_unicode=True))
    write_atomically(folder / "trials.csv", trials.sort_values(METRIC, ascending=False).to_csv(index=False))
    return Found(best, float(row[METRIC]), trials, path, int(trials["failure"].notna().sum()))


def plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def differences(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Only what differs from the defaults, as configuration files hold it."""
    found = {}
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := differences(value, default):
                found[key] = inner
        elif value != default:
            found[key] = value
    return found


class Teller(tune.Callback):
    """One line per finished trial."""

    def __init__(self, board: Board | None) -> None:
        self.board = board
        self.count = 0

    def __reduce__(self) -> tuple:
        return Teller, (None,)  # pickled for a restore that is never asked for; a board holds an open stream

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        self.count += 1
        settings = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in trial.config.items()
        )
        outcome = (
            result.get("failure")
            or f"val macro-F1 {100 * result.get(METRIC, 0):.1f} % after {result.get('step')} epochs"
        )
        if self.board is not None:
            self.board.say(f"[trial {self.count}] {settings}: {outcome}")
