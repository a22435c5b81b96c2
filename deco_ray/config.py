"""The whole configuration: one frozen tree, its defaults (DESIGN: the paper's), its checks.

A YAML file holds only what differs from the defaults; `--set anchors.k=32` overrides one key.
Each section is read by known stages only, and a stage's digest covers exactly the sections it reads.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from deco_ray.errors import ConfigError
from deco_ray.yaml_tree import parse_yaml, read_yaml

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
SEEDS = 2**63  # as many as a column of the results can tell apart
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxlist, SHORT.maxstring, SHORT.maxother = 2, 20, 80, 80

# what the file of a command is called
FILES = {
    "run": "a configuration, which sweep and compare take with --base",
    "sweep": "a sweep, an ablation or a search",
    "compare": "a comparison",
    "reproduce": "a plan",
}


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise ValueError("a path cannot hold the character NUL; remove it")
    return path


Location = Annotated[str, AfterValidator(_without_nul)]  # of a file, a folder or a store


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SyntheticSection(Section):
    """The cohort to synthesise when `cohort` does not exist yet (demo, rehearsals)."""

    preset: Literal["camelyon_lt", "panda_lt", "tissuenet_lt"] = "tissuenet_lt"
    scale: float = Field(1.0, gt=0, le=1, description="share of the paper's slide counts")
    seed: Seed = 0


class SplitSection(Section):
    """Balanced validation and test quotas first, then the exponential long tail on what remains."""

    name: str | None = Field(None, description="a split stored in the cohort; none: made from the keys below")
    val_per_class: int = Field(20, ge=1)
    test_per_class: int = Field(30, ge=1)
    imbalance_ratio: float | None = Field(None, ge=1, description="none keeps the natural distribution")
    order: tuple[int, ...] | None = Field(None, description="classes head to tail; none: by pool size")
    group_by: Literal["case_id"] | None = None
    seed: Seed = 0

    @field_validator("order")
    @classmethod
    def _each_class_once(cls, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if order is not None and sorted(order) != list(range(len(order))):
            raise ValueError(f"must name each class from 0 to {len(order) - 1} once")
        return order


class AnchorSection(Section):
    k: int = Field(64, ge=2, le=4096)
    k_normal: int = Field(32, ge=1, le=4096)
    pool_per_anchor: int = Field(10_000, ge=1, description="pool is at most k times this many patches")
    iterations: int = Field(25, ge=1, le=1000)
    seed: Seed = 0
    backend: Literal["auto", "local", "sharded"] = "auto"
    workers: int | None = Field(None, ge=1, description="actors of the sharded backend; none: one per CPU")


class ModelSection(Section):
    """An aggregator by name (deco_ray.models.model_names) with its options."""

    name: str = "abmil"
    options: dict[str, Any] = Field(default_factory=dict)


class TrainingSection(Section):
    """One slide a step; the paper's optimiser. Everything below early_stop is off by default."""

    epochs: int = Field(30, ge=1, le=10_000)
    lr: float = Field(2e-4, gt=0, le=1)
    weight_decay: float = Field(1e-5, ge=0, le=1)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_epochs: int = Field(0, ge=0)
    clip_norm: float | None = Field(None, gt=0)
    mixed_precision: bool = False
    early_stop: int | None = Field(None, ge=1, description="epochs without a better validation macro-F1")
    loss: Literal["ce", "weighted_ce", "focal", "ldam", "balanced_softmax"] = "ce"
    focal_gamma: float = Field(2.0, ge=0)
    ldam_margin: float = Field(0.5, gt=0)
    resampling: Literal["none", "balanced", "sqrt"] = Field(
        "none", description="of plain runs; DeCo uses `oversampling`"
    )
    post_hoc_tau: float = Field(0.0, ge=0, le=4, description="subtract this times log prior from logits at evaluation")
    retrain_classifier_epochs: int = Field(
        0, ge=0, description="cRT: balanced epochs of the classifier alone at the end"
    )


class CounterfactualSection(Section):
    tau: float = Field(1.0, ge=0, le=4, description="strength of the class-frequency correction (Eq. 6)")
    construction: Literal["normal", "anchor", "zero"] = "normal"
    method: Literal["auto", "exact", "brute"] = "auto"
    memory_cap_mb: int = Field(512, ge=16, description="of the batched brute-force interventions")


class MaskingSection(Section):
    strategy: Literal["counterfactual", "random", "size", "attention", "none"] = "counterfactual"
    lam: Ratio = Field(0.6, description="weight of the rival's contribution (Eq. 8)")
    r_max: float = Field(0.5, ge=0, lt=1, description="0.9 for Camelyon+, 0.5 for PANDA and TissueNet")
    eps: float = Field(1e-8, gt=0)


class PseudoBagSection(Section):
    m: int = Field(3, ge=0, le=64)
    rho: float = Field(0.5, gt=0, le=1)
    strategy: Literal["stratified", "random", "equal"] = "stratified"
    beta: float = Field(0.5, ge=0, description="weight of the consistency loss (Eq. 14)")


class OversamplingSection(Section):
    alpha: float = Field(0.8, ge=0, le=4, description="0 switches oversampling off")
    cap: int = Field(8, ge=1)


class ResourceSection(Section):
    """What one training run takes; how many run side by side follows from the cluster."""

    cpus_per_run: float = Field(1, gt=0)
    gpus_per_run: float = Field(0, ge=0)
    workers_per_run: int = Field(1, ge=1, description="more than one is data-parallel and changes the batch size")
    scorers: int = Field(1, ge=1, description="actors scoring one seed's slides")
    max_concurrent: int | None = Field(None, ge=1)
    max_failures: int = Field(3, ge=0, description="restarts of a run whose process died; never of a bug")
    data: Literal["auto", "memory", "stream"] = "auto"
    threads: int = Field(1, ge=1, description="torch threads of a run: part of the result on CPU")


class TrackingSection(Section):
    enabled: bool = True
    uri: Location | None = Field(None, description="none: SQLite file mlflow.db in the storage folder")
    experiment: str | None = Field(None, description="none: the cohort's name")
    log_models: bool = True
    system_metrics: bool = False


class ReportSection(Section):
    """What the report shows beyond the tables; none of it is read by training."""

    heatmaps: int = Field(4, ge=0, le=100, description="tail-class test slides to draw")
    pdf: bool = Field(True, description="figures also as PDF for papers: about half of the report's time")
    instances: Location | None = Field(None, description=".npz: true class of every patch, by slide id")


class PaperSection(Section):
    """Which of the paper's datasets to print beside ours, and whether the features are the paper's."""

    dataset: Literal["camelyon_lt", "panda_lt", "tissuenet_lt"] | None = None
    same_features: bool = False


class Config(Section):
    name: str = "deco"
    cohort: Location = Field("cohorts/demo", description="folder or URI of a cohort")
    synthetic: SyntheticSection | None = None
    storage: Location = Field("runs", description="folder shared by all nodes: artefacts, reports, mlflow.db")
    method: str = Field("deco", description="deco, or a model name to train plainly")
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    split: SplitSection = SplitSection()
    anchors: AnchorSection = AnchorSection()
    judge: ModelSection = ModelSection()
    judge_training: TrainingSection = TrainingSection()
    counterfactual: CounterfactualSection = CounterfactualSection()
    masking: MaskingSection = MaskingSection()
    pseudo_bags: PseudoBagSection = PseudoBagSection()
    oversampling: OversamplingSection = OversamplingSection()
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    resources: ResourceSection = ResourceSection()
    tracking: TrackingSection = TrackingSection()
    paper: PaperSection = PaperSection()
    report: ReportSection = ReportSection()

    @field_validator("seeds")
    @classmethod
    def _distinct_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= SEEDS:
            raise ValueError("seeds must be distinct, non-negative, below 2**63 and at least one")
        return seeds


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults, then the YAML file, then `key=value` overrides."""
    tree: dict[str, Any] = {}
    source = "the command line"
    if path is not None:
        source = str(path)
        tree = read_file(path, "run")
    for override in overrides:
        set_key(tree, override)
    return build(Config, tree, source)


def read_file(path: str | Path, *commands: str) -> dict[str, Any]:
    """The keys of a YAML file for one of these commands; one whose keys tell that it is for another is refused."""
    tree = read_yaml(path)
    meant = meant_for(tree)
    if meant is not None and meant not in commands:
        raise ConfigError(f"{path} is {FILES[meant]}: `deco-ray {meant} --config {path}` runs it")
    return tree


def meant_for(tree: dict[str, Any]) -> str | None:
    """The command a file is for, where its keys tell."""
    if "kind" in tree:
        return "compare" if tree["kind"] == "comparison" else "sweep"
    if "items" in tree:
        return "reproduce"
    return "run" if tree and set(tree) <= set(Config.model_fields) else None


def set_key(tree: dict[str, Any], override: str) -> None:
    """Apply `a.b.c=value` (value is YAML) to a nested mapping in place."""
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set takes key=value, for example --set anchors.k=32; got {override!r}")
    value = parse_yaml(text, f"--set {name}: the value {SHORT.repr(text)}")
    *parents, last = name.strip().split(".")
    for parent in parents:
        child = tree.get(parent)
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {name}: {parent!r} is a value, not a section")
        tree = child
    tree[last] = value


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """A copy with dotted keys replaced and every check run again: how sweeps and ablations vary one config."""
    tree = config.model_dump(mode="json")
    for name, value in settings.items():
        node = tree
        *parents, last = name.split(".")
        for parent in parents:
            if node.get(parent) is None:  # an optional section that was not there
                node[parent] = {}
            node = node[parent]
            if not isinstance(node, dict):
                raise ConfigError(f"setting {name}: {parent!r} is a value, not a section")
        node[last] = value
    return build(Config, tree, "settings")


def build(model: type[Section], tree: dict[str, Any], source: str) -> Any:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        lines = [explain(model, item) for item in error.errors()]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from None


def explain(model: type[Section], item: Any) -> str:
    """One pydantic error as one line that names the key, the value and the remedy."""
    location = [str(part) for part in item["loc"]]
    name = ".".join(location) or "configuration"
    if item["type"] == "extra_forbidden":
        near = nearest_key(model, location)
        hint = f"; did you mean {near!r}?" if near else ""
        return f"unknown key {name!r}{hint}"
    if item["type"] == "missing":
        return f"{name} is missing"
    shown = shorten(item.get("input"))
    if item["type"] in ("model_type", "model_attributes_type"):
        return (
            f"{name} = {shown}: this is a section; give its keys, such as {name}.{next(iter(keys_at(model, location)))}"
        )
    return f"{name} = {shown}: {item['msg'][0].lower()}{item['msg'][1:]}"


def shorten(value: Any) -> str:
    """A value as a message can carry it: written out where that is short, else its type."""
    try:
        text = SHORT.repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return type(value).__name__
    return text if len(text) < 80 else type(value).__name__


def nearest_key(model: type[Section], location: list[str]) -> str | None:
    """The valid key closest to a mistyped one: same section first, then the whole tree."""
    section = section_at(model, location[:-1])
    if section is not None:
        match = difflib.get_close_matches(location[-1], list(section.model_fields), 1, 0.6)
        if match:
            return ".".join([*location[:-1], match[0]])
    everywhere = {name.rsplit(".", 1)[-1]: name for name in reversed(keys(model))}
    match = difflib.get_close_matches(location[-1], list(everywhere), 1, 0.6)
    return everywhere[match[0]] if match else None


def section_at(model: type[Section], location: Sequence[str]) -> type[Section] | None:
    for part in location:
        field = model.model_fields.get(part)
        child = _section_of(field.annotation) if field else None
        if child is None:
            return None
        model = child
    return model


def keys_at(model: type[Section], location: Sequence[str]) -> list[str]:
    """The keys of the section at a place in the tree."""
    section = section_at(model, location)
    return list(section.model_fields) if section else []


def keys(model: type[Section], prefix: str = "") -> list[str]:
    """All dotted keys of the tree."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        child = _section_of(field.annotation)
        names += keys(child, f"{prefix}{name}.") if child else [f"{prefix}{name}"]
    return names


def _section_of(annotation: Any) -> type[Section] | None:
    for candidate in (
        annotation,
        *(get_args(annotation) if get_origin(annotation) in (Union, type(int | None)) else ()),
    ):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None
