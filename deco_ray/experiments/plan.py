"""The whole paper as one plan: every table and figure over the cohorts given, identical work merged by digests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from deco_ray.cohort.presets import PRESETS
from deco_ray.config import Config, Section, build, load_config, read_file, with_settings
from deco_ray.errors import ConfigError
from deco_ray.experiments.methods import Run
from deco_ray.experiments.session import absolute
from deco_ray.experiments.study import Study
from deco_ray.experiments.variants import read_variants
from deco_ray.experiments.varied import Varied, add_varied


class PlanItem(Section):
    """A table or figure: a variant file, or an analysis of the main runs; on all cohorts unless some are named."""

    file: str | None = None
    analysis: Literal["longtail", "heatmaps"] | None = None
    cohorts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> PlanItem:
        if (self.file is None) == (self.analysis is None):
            raise ValueError("an item has either a file or an analysis")
        return self


class PlanFile(Section):
    title: str
    cohorts: dict[str, str] = Field(min_length=1, description="name -> configuration, relative to this file")
    items: dict[str, PlanItem] = Field(min_length=1)


@dataclass
class Plan:
    """The file opened on its cohorts: one study, and what each item takes from it."""

    file: PlanFile
    study: Study
    varied: dict[str, dict[str, Varied]] = field(default_factory=dict)  # item -> cohort -> runs
    main: dict[str, list[Run]] = field(default_factory=dict)  # cohort -> DeCo's runs, for the analyses
    configs: dict[str, Config] = field(default_factory=dict)

    def counts(self) -> tuple[int, int, int]:
        """Trainings if every experiment brought its own judges; unique ones; those still to do."""
        unique = sum(stage.kind == "model" for stage in self.study.graph)
        missing = sum(stage.kind == "model" for stage in self.study.missing().values())
        return self.study.naive, unique, missing


def open_plan(
    path: str | Path,
    only: Sequence[str] = (),
    cohorts: Sequence[str] = (),
    scale: float | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Expand the plan; cohorts of a rehearsal are synthesised, the real ones must exist."""
    file: PlanFile = build(PlanFile, read_file(path, "reproduce"), str(path))
    items = chosen(file.items, only, "item")
    names = chosen(file.cohorts, cohorts, "cohort")
    configs = {name: cohort_config(Path(path).parent / file.cohorts[name], name, scale, overrides) for name in names}
    plan = Plan(file, Study(next(iter(configs.values()))), configs=configs)
    for item_name in items:
        item = file.items[item_name]
        for name in names:
            if item.cohorts is not None and name not in item.cohorts:
                continue
            if item.file is not None:
                variants = read_variants(Path(path).parent / item.file)
                config = with_settings(configs[name], variants.settings) if variants.settings else configs[name]
                plan.varied.setdefault(item_name, {})[name] = add_varied(plan.study, variants, config)
            elif name not in plan.main:
                plan.main[name] = plan.study.add(configs[name])
    return plan


def chosen(known: dict, wanted: Sequence[str], what: str) -> list[str]:
    for name in wanted:
        if name not in known:
            raise ConfigError(f"the plan has no {what} {name!r}; it has {', '.join(known)}")
    return [name for name in known if not wanted or name in wanted]


def cohort_config(path: Path, name: str, scale: float | None, overrides: Sequence[str]) -> Config:
    """The cohort's configuration; in a rehearsal on a synthetic cohort of the same shape, its quotas scaled alike."""
    config = load_config(path, overrides)
    if scale is not None:
        if name not in PRESETS:
            raise ConfigError(f"--scale makes synthetic cohorts; there is no preset for {name!r}: {', '.join(PRESETS)}")
        split = config.split
        config = with_settings(
            config,
            {
                "cohort": f"cohorts/rehearsal_{name}_{scale:g}",
                "synthetic": {"preset": name, "scale": scale},
                "split.val_per_class": max(2, round(split.val_per_class * scale)),
                "split.test_per_class": max(3, round(split.test_per_class * scale)),
                "paper.same_features": False,
            },
        )
    return absolute(config)
