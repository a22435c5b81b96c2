"""Any text as configuration, override, labels or split: a clear error or a checked result; nothing in it is run."""

from __future__ import annotations

import pytest
from fuzzing import fuzz, speaks
from hypothesis import given
from hypothesis import strategies as st

from deco_ray.cohort.imports import read_split
from deco_ray.cohort.labels import match_labels, read_labels, resolve_classes
from deco_ray.config import Config, keys, load_config
from deco_ray.errors import CohortError, ConfigError

WORDS = [
    "anchors",
    "k",
    "seeds",
    "training",
    "lr",
    "name",
    "cohort",
    ":",
    "-",
    "[",
    "]",
    "{",
    "}",
    "1",
    "0x1F",
    "1e400",
    ".inf",
    ".nan",
    "~",
    "yes",
    "2020-13-45",
    "&",
    "&a",
    "*a",
    "<<",
    '"',
    "'",
    "#",
    "|",
    ">",
    "---",
    "1_000",
    "0o8",
    "64",
    "?",
    "!!set",
    "!!binary",
    "!!python/object/apply:os.system",
    "%YAML",
    "!",
    "@",
]
words = st.sampled_from([*WORDS, ": ", "- ", "? ", "\n", "\n  ", "\t", "\ufeff", "\x00", "%YAML 9"])
yaml_like = st.lists(words | st.text(max_size=5), max_size=14).map("".join)
values = st.text(max_size=20) | st.integers().map(str) | st.floats().map(str) | yaml_like


def write(path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))


def test_any_file_as_configuration(tmp_path):
    path = tmp_path / "config.yaml"

    @fuzz
    @given(yaml_like | st.binary(max_size=60))
    def check(text):
        write(path, text)
        try:
            config = load_config(path)
        except ConfigError as error:
            speaks(error, str(path))
            return
        assert Config.model_validate(config.model_dump()) == config

    check()


@fuzz
@given(st.sampled_from(keys(Config)) | st.text(max_size=12), values)
def test_any_override(key, value):
    try:
        config = load_config(None, [f"{key}={value}"])
    except ConfigError as error:
        speaks(error)
        return
    assert Config.model_validate(config.model_dump()) == config


def test_a_tag_in_a_configuration_runs_nothing(tmp_path):
    trap, path = tmp_path / "executed", tmp_path / "config.yaml"
    for text in (f"name: !!python/object/apply:os.system ['touch {trap}']", f"!!python/name:os.system {trap}"):
        write(path, text)
        with pytest.raises(ConfigError):
            load_config(path)
        with pytest.raises(ConfigError):
            load_config(None, [f"name={text.removeprefix('name: ')}"])
    assert not trap.exists()


cells = st.text(max_size=8) | st.sampled_from(
    ["slide_id", "case_id", "label", "train", "val", "test", "True", "0", "²"]
)
tables = st.lists(st.lists(cells, max_size=5).map(",".join), max_size=6).map("\n".join)
labelled = tables.map(lambda text: f"case_id,slide_id,label\n{text}")
ragged = tables.map(lambda text: f"train,val,test\n{text}")
paths = tables.map(lambda text: f"train_slide_path,train_label,val_slide_path\n{text}")


def test_any_labels(tmp_path):
    path = tmp_path / "labels.csv"

    @fuzz
    @given(tables | labelled | st.binary(max_size=60))
    def check(text):
        write(path, text)
        try:
            rows = read_labels(path)
            classes = resolve_classes(None, None, [row.label for row in rows], None)
        except CohortError as error:
            speaks(error)
            return
        files = [(row.slide_id, f"{row.slide_id}.h5") for row in rows]
        matched, problems = match_labels(files, rows, classes, str(path))
        assert set(matched) | {problem.slide_id for problem in problems} == {row.slide_id for row in rows}
        assert all(0 <= label < len(classes.names) for _, label in matched.values())

    check()


def test_any_split(tmp_path):
    path = tmp_path / "splits_0.csv"

    @fuzz
    @given(tables | ragged | paths | st.binary(max_size=60))
    def check(text):
        write(path, text)
        try:
            assignment = read_split(path)
        except CohortError as error:
            speaks(error, str(path))
            return
        assert assignment
        assert set(assignment.values()) <= {"train", "val", "test"}

    check()
