"""The configuration tree: the paper's defaults, and errors that name the key, the range and the remedy."""

from itertools import pairwise
from string import ascii_lowercase

import pytest
from pydantic import ValidationError

from deco_ray.config import Config, keys, load_config, with_settings
from deco_ray.errors import ConfigError


def yaml(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


# DESIGN, section 5: the method, pinned down
DEFAULTS = {
    "anchors.k": 64,
    "anchors.k_normal": 32,
    "anchors.pool_per_anchor": 10_000,
    "counterfactual.tau": 1,
    "counterfactual.construction": "normal",
    "masking.strategy": "counterfactual",
    "masking.lam": 0.6,
    "masking.eps": 1e-8,
    "masking.r_max": 0.5,
    "pseudo_bags.rho": 0.5,
    "pseudo_bags.m": 3,
    "pseudo_bags.beta": 0.5,
    "pseudo_bags.strategy": "stratified",
    "oversampling.alpha": 0.8,
    "oversampling.cap": 8,
    "judge.name": "abmil",
    "model.name": "abmil",
    "judge_training.epochs": 30,
    "training.epochs": 30,
    "training.lr": 2e-4,
    "training.weight_decay": 1e-5,
    "training.loss": "ce",
    "training.early_stop": None,
    "split.group_by": None,
    "seeds": (0, 1, 2, 3, 4),
}


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults_are_the_papers(name, value):
    node = load_config()
    for part in name.split("."):
        node = getattr(node, part)
    assert node == value


def test_judge_and_final_model_train_alike_by_default():
    assert load_config().judge_training == load_config().training


def test_a_file_changes_what_it_names_and_an_override_wins(tmp_path):
    config = load_config(yaml(tmp_path, "anchors: {k: 16}\nmasking: {lam: 0.2}\n"), ["anchors.k=32", "seeds=[7]"])
    assert (config.anchors.k, config.masking.lam, config.seeds) == (32, 0.2, (7,))
    assert config.anchors.k_normal == 32
    assert load_config(yaml(tmp_path, "")) == Config()


def test_overrides_are_yaml_values():
    config = load_config(
        None, ["split.imbalance_ratio=null", "training.clip_norm=1", "tracking.enabled=false", "name=a=b"]
    )
    assert config.split.imbalance_ratio is None
    assert (config.training.clip_norm, config.tracking.enabled, config.name) == (1.0, False, "a=b")
    assert load_config(None, ["training.lr=1e-4"]).training.lr == 1e-4  # YAML 1.1 takes 1e-4 for a text
    assert load_config(None, ["model.options.gated=true"]).model.options == {"gated": True}
    assert load_config(None, ["synthetic.scale=0.5"]).synthetic.scale == 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("anchors.kk=3", r"unknown key 'anchors\.kk'; did you mean 'anchors\.k'\?"),
        ("anchor.k=3", r"unknown key 'anchor'; did you mean 'anchors'\?"),
        ("r_max=0.5", r"unknown key 'r_max'; did you mean 'masking\.r_max'\?"),
        ("masking.alpha=0.5", r"unknown key 'masking\.alpha'; did you mean 'oversampling\.alpha'\?"),
        ("synthetic.presett=x", r"did you mean 'synthetic\.preset'\?"),
        ("zzzqqq=1", r"unknown key 'zzzqqq'$"),
        ("masking.r_max=1", r"masking\.r_max = 1: .*less than 1"),
        ("masking.lam=-0.1", r"masking\.lam = -0\.1: .*greater than or equal to 0"),
        ("anchors.k=1", r"anchors\.k = 1: .*greater than or equal to 2"),
        ("anchors.k=5000", r"anchors\.k = 5000: .*less than or equal to 4096"),
        ("anchors.k=many", r"anchors\.k = 'many': .*valid integer"),
        ("training.lr=.nan", r"training\.lr = nan: .*finite"),
        ("training.lr=.inf", r"training\.lr = inf: .*finite"),
        ("training.loss=hinge", r"training\.loss = 'hinge': .*'ce', 'weighted_ce'"),
        ("seeds=[1,1]", r"seeds = .*distinct"),
        ("seeds=[]", r"seeds = .*at least one"),
        ("seeds=[-1]", r"seeds = .*non-negative"),
        ("seeds=[9223372036854775808]", r"seeds = .*below 2\*\*63"),
        ("split.seed=9223372036854775808", r"split\.seed = .*less than 9223372036854775808"),
        ('cohort="a\\0b"', r"cohort = 'a\\x00b': .*NUL"),
        ('storage="a\\0b"', r"storage = .*NUL"),
        ('report.instances="a\\0b"', r"report\.instances = .*NUL"),
        ('tracking.uri="a\\0b"', r"tracking\.uri = .*NUL"),
        ("anchors=3", r"anchors = 3: this is a section; give its keys, such as anchors\.k$"),
        ("split.order=[0,0]", r"split\.order = .*once"),
        ("name=", r"name = None"),
    ],
)
def test_wrong_keys_and_values_are_named_with_the_remedy(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_all_mistakes_are_told_at_once_with_their_file(tmp_path):
    path = yaml(tmp_path, "anchors: {kk: 3, k: 0}\nmasking: {lam: 2}\n")
    with pytest.raises(ConfigError) as told:
        load_config(path)
    for part in (str(path), "anchors.kk", "anchors.k = 0", "masking.lam = 2"):
        assert part in str(told.value)


@pytest.mark.parametrize("override", ["anchors.k", "=3", "", "anchors.k=[1"])
def test_malformed_overrides_show_the_form(override):
    with pytest.raises(ConfigError, match="--set"):
        load_config(None, [override])


def test_a_value_is_not_a_section():
    with pytest.raises(ConfigError, match="'name' is a value, not a section"):
        load_config(None, ["name=x", "name.y=1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.system ['echo hacked']", "cannot be read as YAML"),
        ("[1, 2]", "must hold a mapping"),
        ("a: [", "cannot be read as YAML"),
        ("when: 2020-13-45", "cannot be read as YAML"),
        ("1: 2", "1 = 1: keys should be strings"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(yaml(tmp_path, text))


BOMB = "[&a [x, x], " + ", ".join(f"&{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in pairwise("abcdefghi")) + "]"
MERGES = "{a: &a {x: 1}, " + ", ".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}" for a, b in pairwise(ascii_lowercase)) + "}"


@pytest.mark.parametrize("value", ["&a {b: *a}", "[" * 400 + "]" * 400, "[" * 60 + "]" * 60, BOMB, MERGES])
@pytest.mark.parametrize("key", ["model.options.x", "seeds"])
def test_values_without_end_are_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=r"--set \S+: the value .*(levels|deeply|merged)") as told:
        load_config(None, [f"{key}={value}"])
    assert len(str(told.value)) < 1000
    path = yaml(tmp_path, key.replace(".", ": {") + f": {value}" + "}" * key.count("."))
    with pytest.raises(ConfigError, match=r"c\.yaml .*(levels|deeply|merged)"):
        load_config(path)


def test_an_alias_repeats_what_it_names(tmp_path):
    config = load_config(yaml(tmp_path, "judge_training: &t {epochs: 3}\ntraining: {<<: *t, lr: 0.1}\n"))
    assert (config.judge_training.epochs, config.training.epochs, config.training.lr) == (3, 3, 0.1)


@pytest.mark.parametrize("value", ["[" + ", ".join(["a"] * 50) + "]", "0x" + "f" * 5000, "[[[[[[1]]]]]]", "x" * 5000])
def test_long_values_are_told_in_short(value):
    with pytest.raises(ConfigError, match=r"anchors\.k = ") as told:
        load_config(None, [f"anchors.k={value}"])
    assert len(str(told.value)) < 250


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file at .*the repository's folder configs/"):
        load_config(tmp_path / "nowhere.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_a_key_given_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'masking' twice"):
        load_config(yaml(tmp_path, "masking: {lam: 0.2}\nanchors: {k: 4}\nmasking: {r_max: 0.9}\n"))


def test_the_tree_is_frozen():
    config = load_config()
    with pytest.raises(ValidationError):
        config.name = "other"
    with pytest.raises(ValidationError):
        config.anchors.k = 3


def test_settings_vary_one_config_and_are_checked():
    base = load_config(None, ["anchors.k=16"])
    varied = with_settings(base, {"masking.lam": 0.4, "judge.options.gated": True})
    assert (varied.masking.lam, varied.anchors.k, varied.judge.options) == (0.4, 16, {"gated": True})
    assert base.masking.lam == 0.6
    assert base.judge.options == {}
    assert with_settings(base, {}) == base
    assert with_settings(base, {"synthetic.scale": 0.5}).synthetic.scale == 0.5
    with pytest.raises(ConfigError, match=r"did you mean 'masking\.lam'"):
        with_settings(base, {"masking.lamb": 0.4})
    with pytest.raises(ConfigError, match="is a value, not a section"):
        with_settings(base, {"name.x": 1})


def test_every_key_round_trips_through_its_dotted_name():
    names = keys(Config)
    assert len(names) == len(set(names))
    assert {"anchors.k", "synthetic.scale", "seeds", "paper.dataset"} <= set(names)
    tree = load_config().model_dump(mode="json")
    assert Config.model_validate(tree) == load_config()
