"""From one configuration to its stages: the chain judge → contributions → final, or a plain training, per seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from deco_ray.anchors import anchor_inputs
from deco_ray.artefacts import digest
from deco_ray.cohort import Cohort
from deco_ray.cohort.splits import Split
from deco_ray.config import Config, ModelSection, TrainingSection
from deco_ray.counterfactual.table import contribution_inputs
from deco_ray.errors import ConfigError
from deco_ray.experiments.stages import ScoreStage, Stage, TrainStage
from deco_ray.models import create_model, model_names
from deco_ray.training.spec import DecoSpec, RunSpec

DECO = "deco"


@dataclass(frozen=True)
class Run:
    """One row of results to be: which model answers for (method, setting, seed)."""

    method: str
    setting: str  # "" for the method's own defaults
    seed: int
    model: str  # digest of the stage whose predictions count
    judge: str | None = None  # DeCo only
    contributions: str | None = None
    anchors: str | None = None
    site: str = ""  # digest of the split
    settings: tuple[tuple[str, Any], ...] = ()  # what differs from the base configuration

    def named(self, method: str, setting: str, settings: dict[str, Any] | None, site: str) -> Run:
        return replace(
            self, method=method, setting=setting, site=site, settings=tuple(sorted((settings or {}).items()))
        )


def anchors_digest(config: Config, cohort: Cohort, split: Split) -> str:
    return digest(anchor_inputs(cohort, split, config.anchors))


def expand(config: Config, cohort: Cohort, split: Split) -> tuple[list[Run], list[Stage]]:
    """Runs and stages of one configuration; nothing is computed, every digest follows from the inputs."""
    check_method(config)
    runs: list[Run] = []
    stages: list[Stage] = []
    for seed in config.seeds:
        run, chain = (
            _deco(config, cohort, split, seed) if config.method == DECO else _plain(config, cohort, split, seed)
        )
        runs.append(run)
        stages += chain
    return runs, stages


def check_method(config: Config) -> None:
    names = model_names()
    for key, name in (("method", config.method), ("model.name", config.model.name), ("judge.name", config.judge.name)):
        if name not in names and not (key == "method" and name == DECO):
            raise ConfigError(
                f"{key} = {name!r} is unknown; use {DECO + ', ' if key == 'method' else ''}{', '.join(names)}"
            )


def epoch_warnings(config: Config) -> list[str]:
    """Judge and final model are set apart and stand side by side in the results: say it when one trains longer."""
    judge, final = config.judge_training.epochs, config.training.epochs
    if config.method != DECO or judge == final:
        return []
    return [
        f"the judge trains {judge} epochs, the final model {final}: results compare the two all the same; "
        "training.epochs is not the judge's, set judge_training.epochs too"
    ]


def _plain(config: Config, cohort: Cohort, split: Split, seed: int) -> tuple[Run, list[Stage]]:
    options = config.model.options if config.model.name == config.method else {}
    model = ModelSection(name=config.method, options=options)
    stages = train_plain(config, cohort, split, model, config.training, seed, config.method)
    return Run(config.method, "", seed, stages[-1].digest), stages


def _deco(config: Config, cohort: Cohort, split: Split, seed: int) -> tuple[Run, list[Stage]]:
    anchors = anchors_digest(config, cohort, split)
    stages = train_plain(config, cohort, split, config.judge, config.judge_training, seed, "judge")
    judge = stages[-1].digest
    inputs = contribution_inputs(anchors, judge, config.counterfactual)
    score = ScoreStage(
        digest(inputs), f"contributions seed {seed}", seed, split.digest, judge, anchors, config.counterfactual
    )
    spec = RunSpec(
        kind="deco",
        stage="final",
        cohort=cohort.checksum,
        split=split.digest,
        model=config.model,
        training=config.training,
        seed=seed,
        threads=config.resources.threads,
        workers=config.resources.workers_per_run,
        deco=DecoSpec(
            contributions=score.digest,
            anchors=anchors,
            masking=config.masking,
            pseudo_bags=config.pseudo_bags,
            oversampling=config.oversampling,
        ),
    )
    pretraining, spec = with_pretraining(config, cohort, split, spec)
    final = TrainStage(spec.digest, f"final seed {seed}", spec, (score.digest, *(p.digest for p in pretraining)))
    run = Run(DECO, "", seed, final.digest, judge=judge, contributions=score.digest, anchors=anchors)
    return run, [*stages, score, *pretraining, final]


def train_plain(
    config: Config, cohort: Cohort, split: Split, model: ModelSection, training: TrainingSection, seed: int, stage: str
) -> list[Stage]:
    """The stages of one plain training on full bags; the last one is the model."""
    spec = RunSpec(
        kind="plain",
        stage=stage,
        cohort=cohort.checksum,
        split=split.digest,
        model=model,
        training=training,
        seed=seed,
        threads=config.resources.threads,
        workers=config.resources.workers_per_run,
    )
    pretraining, spec = with_pretraining(config, cohort, split, spec)
    return [*pretraining, TrainStage(spec.digest, f"{stage} seed {seed}", spec, tuple(p.digest for p in pretraining))]


def with_pretraining(config: Config, cohort: Cohort, split: Split, spec: RunSpec) -> tuple[list[Stage], RunSpec]:
    """Methods that start from a trained plain model (MHIM's teacher) get that model as a stage of its own."""
    model = create_model(spec.model.name, cohort.dim, len(cohort.classes), **spec.model.options)
    wanted = model.pretraining()
    if wanted is None:
        return [], spec
    name, options = wanted
    first = train_plain(
        config,
        cohort,
        split,
        ModelSection(name=name, options=options),
        spec.training,
        spec.seed,
        f"base of {spec.model.name}",
    )
    return first, spec.model_copy(update={"pretrained": first[-1].digest})
