"""YAML as users write it, read safely: no tags, no key twice, no more values than a configuration can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deco_ray.errors import ConfigError

MOST_VALUES = 10_000  # of a configuration, with every alias written out: far more than there are keys
DEEPEST = 50  # sections within sections


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[str] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} twice", key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MOST_VALUES:  # merges of merges double each time, in memory, before anyone can count
            raise yaml.constructor.ConstructorError(None, None, "too many merged keys", node.start_mark)


class _TextLoader(_StrictLoader):
    """The same, with every value the text that was written."""

    yaml_implicit_resolvers = {}  # noqa: RUF012


def parse_yaml(text: str, what: str, all_text: bool = False) -> Any:
    """YAML as plain values or as texts, few and shallow enough for every later step to walk them."""
    try:
        value = yaml.load(text, _TextLoader if all_text else _StrictLoader)
    except RecursionError:
        raise ConfigError(f"{what} cannot be read as YAML: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: YAML dates such as 2020-13-45 reach datetime before any check
        raise ConfigError(f"{what} cannot be read as YAML: {error}") from error
    _check_extent(value, what)
    return value


def _check_extent(value: Any, what: str) -> None:
    """Refuse a few lines whose aliases make them huge, or endless where an alias holds itself."""
    todo, count = [(value, 0)], 0
    while todo:
        node, depth = todo.pop()
        inner = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list | tuple | set) else ()
        todo += [(child, depth + 1) for child in inner]
        count += len(inner)
        if depth > DEEPEST or count > MOST_VALUES:
            raise ConfigError(
                f"{what} holds more than {MOST_VALUES} values or {DEEPEST} levels once its aliases (*name) are written "
                "out; write the keys that differ from the defaults only, and no alias inside what it names"
            )


def read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise ConfigError(
            f"no configuration file at {path}; the shipped ones are in the repository's folder configs/; "
            "run from the repository, or give a file's whole path"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: not a text, or no name a file can have
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not a {type(tree).__name__}")
    return tree
