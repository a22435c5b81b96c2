"""Many settings of one configuration from one small YAML: a sweep, an ablation, a comparison, an imbalance study.

A file names what varies, and nothing else:

    axis + values     one key over a grid (sweep)
    variants          named sets of settings (ablation)
    methods           models trained plainly, and `deco` (comparison)
    axis + methods    each method along the grid (imbalance study)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from deco_ray.config import Config, Section, build, load_config, read_file, with_settings
from deco_ray.errors import ConfigError
from deco_ray.experiments.methods import DECO

Kind = Literal["sweep", "ablation", "comparison", "imbalance"]
KINDS = get_args(Kind)


class Variant(Section):
    """One setting: what the results call it, what a reader sees, the keys it changes."""

    name: str
    label: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class VariantFile(Section):
    kind: Kind
    title: str
    base: str | None = Field(None, description="configuration the settings apply to; relative to this file")
    settings: dict[str, Any] = Field(default_factory=dict, description="applied to every variant")
    axis: str | None = None
    axis_label: str = ""
    values: tuple[Any, ...] = ()
    variants: tuple[Variant, ...] = ()
    methods: tuple[str, ...] = ()
    reference: str | None = Field(None, description="the variant the others are compared with")
    paper_table: str | None = Field(None, description="table of the paper to print beside ours")

    @field_validator("kind", mode="before")
    @classmethod
    def _known_kind(cls, kind: Any) -> Any:
        if kind not in KINDS:
            raise ValueError(f"use {', '.join(KINDS)}; or search, which `deco-ray sweep` runs")
        return kind

    @model_validator(mode="after")
    def _has_something_to_vary(self) -> VariantFile:
        if (self.axis is None) != (not self.values):
            raise ValueError("axis and values go together")
        if not (self.axis or self.variants or self.methods):
            raise ValueError("nothing varies: give axis and values, variants, or methods")
        names = [variant.name for variant in self.expanded()]
        if len(set(names)) != len(names):
            raise ValueError(f"two variants have one name: {', '.join(names)}")
        if self.reference is not None and self.reference not in names:
            raise ValueError(f"reference {self.reference!r} is not a variant: {', '.join(names)}")
        return self

    def expanded(self) -> list[Variant]:
        """Every variant with its settings; along an axis the name is the value."""
        named = list(self.variants) + [Variant(name=m, settings={"method": m}) for m in self.methods]
        if self.axis is None:
            return named
        points = []
        for base in named or [Variant(name="")]:
            for value in self.values:
                name = f"{base.name} {value}".strip()
                points.append(Variant(name=name, label=base.label, settings={**base.settings, self.axis: value}))
        return points

    def told(self, variant: Variant) -> str:
        """What sets a variant's stages apart: its place on the axis, its name unless that is the method, or both."""
        if len(self.expanded()) == 1:
            return ""
        if self.axis is None:
            return "" if variant.name == variant.settings.get("method") else variant.name
        place = f"{self.axis_label or self.axis} {variant.settings[self.axis]}"
        own = variant.name.removesuffix(str(variant.settings[self.axis])).strip()
        return place if own in ("", variant.settings.get("method")) else f"{own}, {place}"

    @property
    def reference_name(self) -> str:
        """What the others are compared with: named, else DeCo, else the last (the full method of a ladder)."""
        names = [variant.name for variant in self.expanded()]
        if self.reference is not None:
            return self.reference
        return DECO if DECO in names else names[-1]


def read_variants(path: str | Path) -> VariantFile:
    return build(VariantFile, read_file(path, "sweep", "compare"), str(path))


def load_variants(
    path: str | Path, base: str | None = None, overrides: tuple[str, ...] = ()
) -> tuple[VariantFile, Config]:
    """The file and the configuration it varies (`base` replaces the one it names)."""
    file = read_variants(path)
    named = base or (str(Path(path).parent / file.base) if file.base else None)
    config = load_config(named, overrides)
    return file, with_settings(config, file.settings) if file.settings else config


def members(file: VariantFile, config: Config) -> list[tuple[Variant, Config]]:
    """The configuration of every variant, checked before anything runs."""
    checked = []
    for variant in file.expanded():
        try:
            checked.append((variant, with_settings(config, variant.settings)))
        except ConfigError as error:
            raise ConfigError(f"variant {variant.name!r}: {error}") from None
    return checked
