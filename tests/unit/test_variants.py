"""Variant files: what they expand to, and that every shipped configuration loads and is explained in its header."""

from pathlib import Path

import pytest
from pipeline_site import tiny_config

from deco_ray.config import Config, load_config
from deco_ray.errors import ConfigError
from deco_ray.experiments.methods import epoch_warnings
from deco_ray.experiments.plan import open_plan
from deco_ray.experiments.study import Study
from deco_ray.experiments.variants import VariantFile, load_variants, members
from deco_ray.experiments.varied import add_varied

CONFIGS = Path(__file__).parents[2] / "configs"
VARIED = sorted([*CONFIGS.glob("sweeps/*.yaml"), *CONFIGS.glob("ablations/*.yaml")])
VARIED = [path for path in VARIED if "search" not in path.stem] + [
    CONFIGS / "compare.yaml",
    CONFIGS / "rebalancing.yaml",
]


@pytest.mark.parametrize("path", VARIED, ids=lambda path: path.stem)
def test_every_shipped_variant_file_expands_to_valid_configurations(path):
    file, config = load_variants(path)
    assert len(members(file, config)) >= 2
    assert not [note for _, member in members(file, config) for note in epoch_warnings(member)]
    assert file.reference_name in [variant.name for variant in file.expanded()] or file.axis


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_opens_with_what_it_is_and_its_command(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("jobs/" in line or "make " in line for line in head), "the header names the command"
    assert any("Time" in line for line in head), "the header names the time"
    shorter = [line for line in head if " training.epochs=" in line]
    assert all(" judge_training.epochs=" in line for line in shorter), "else the judge trains its 30 epochs"


@pytest.mark.parametrize("name", ["demo", "camelyon_lt", "panda_lt", "tissuenet_lt"])
def test_base_configurations_load(name):
    config = load_config(CONFIGS / f"{name}.yaml")
    assert config.name == name
    assert epoch_warnings(config) == []


def test_an_axis_makes_one_variant_per_value():
    file = VariantFile(kind="sweep", title="t", axis="masking.lam", values=[0.0, 0.5])
    assert [(v.name, v.settings) for v in file.expanded()] == [
        ("0.0", {"masking.lam": 0.0}),
        ("0.5", {"masking.lam": 0.5}),
    ]


def test_methods_along_an_axis():
    file = VariantFile(
        kind="imbalance", title="t", axis="split.imbalance_ratio", values=[10, 20], methods=["abmil", "deco"]
    )
    assert [v.name for v in file.expanded()] == ["abmil 10", "abmil 20", "deco 10", "deco 20"]
    assert file.expanded()[2].settings == {"method": "deco", "split.imbalance_ratio": 10}


def test_a_bad_value_names_its_variant():
    file = VariantFile(kind="sweep", title="t", axis="masking.lam", values=[0.5, 7.0])
    with pytest.raises(ConfigError, match=r"variant '7.0'.*masking.lam = 7.0.*less than or equal to 1"):
        members(file, Config())


def test_a_reference_that_is_no_variant_is_told_before_anything_runs(tmp_path):
    path = tmp_path / "methods.yaml"
    path.write_text("kind: comparison\ntitle: t\nmethods: [abmil, deco]\nreference: dsmil\n")
    with pytest.raises(ConfigError, match="reference 'dsmil' is not a variant: abmil, deco"):
        load_variants(path)


def test_nothing_to_vary_is_an_error(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("kind: sweep\ntitle: nothing\n")
    with pytest.raises(ConfigError, match="nothing varies"):
        load_variants(path)


def test_a_missing_key_is_named_as_missing_and_a_mistyped_kind_with_all_there_are(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("title: t\naxis: masking.lam\nvalues: [0.1]\n")
    with pytest.raises(ConfigError, match=r"sweep\.yaml: kind is missing$"):
        load_variants(path)
    path.write_text("kind: serach\ntitle: t\nspace: {}\n")
    with pytest.raises(ConfigError, match=r"kind = 'serach': .*sweep, ablation, comparison, imbalance; or search"):
        load_variants(path)


@pytest.mark.parametrize(
    ("load", "name", "meant"),
    [
        (load_config, "compare", "a comparison: `deco-ray compare --config"),
        (load_config, "sweeps/search", "a sweep, an ablation or a search: `deco-ray sweep --config"),
        (load_config, "paper", "a plan: `deco-ray reproduce --config"),
        (load_variants, "demo", "a configuration, which sweep and compare take with --base: `deco-ray run --config"),
        (load_variants, "paper", "a plan: `deco-ray reproduce --config"),
        (open_plan, "demo", "a configuration, .*: `deco-ray run --config"),
        (open_plan, "rebalancing", "a comparison: `deco-ray compare --config"),
    ],
)
def test_a_file_for_another_command_is_answered_with_that_command(load, name, meant):
    with pytest.raises(ConfigError, match=rf"{name}\.yaml is {meant} .*{name}\.yaml` runs it$"):
        load(CONFIGS / f"{name}.yaml")


AXIS = {"axis": "masking.lam", "axis_label": "λ", "values": [0.0, 0.6]}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (AXIS, ["λ 0.0", "λ 0.6"]),
        ({**AXIS, "axis_label": ""}, ["masking.lam 0.0", "masking.lam 0.6"]),
        ({**AXIS, "values": [0.0]}, [""]),  # nothing to be told from
        ({**AXIS, "methods": ["abmil", "deco"]}, ["λ 0.0", "λ 0.6"] * 2),
        ({**AXIS, "variants": [{"name": "mild", "settings": {"anchors.k": 4}}]}, ["mild, λ 0.0", "mild, λ 0.6"]),
        ({"methods": ["abmil", "deco"]}, ["", ""]),  # stages are called by their method already
        ({"variants": [{"name": "random"}, {"name": "abmil", "settings": {"method": "abmil"}}]}, ["random", ""]),
    ],
)
def test_a_variant_is_told_by_what_sets_it_apart(keys, told):
    file = VariantFile(kind="sweep", title="t", **keys)
    assert [file.told(variant) for variant in file.expanded()] == told


@pytest.mark.parametrize(
    ("axis", "own"), [("masking.lam", {"final"}), ("counterfactual.tau", {"final", "contributions"})]
)
def test_stages_bear_their_variant_unless_it_shares_them(tiny_cohort, tmp_path, axis, own):
    config = tiny_config(tiny_cohort.uri, tmp_path, seeds=[0])
    file = VariantFile(kind="sweep", title="t", axis=axis, axis_label="x", values=[0.0, 0.5, 1.0])
    study, plain = Study(config), Study(config)
    add_varied(study, file, config)
    for _, member in members(file, config):
        plain.add(member)
    assert list(study.graph.stages) == list(plain.graph.stages)  # digests know nothing of it
    titles = [f"{what} seed 0 (x {value})" for value in (0.0, 0.5, 1.0) for what in own]
    titles += [f"{what} seed 0" for what in {"judge", "contributions", "final"} - own]
    assert sorted(stage.title for stage in study.graph) == sorted(titles)
