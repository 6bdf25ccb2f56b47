"""Loads a run's configuration from a YAML file and dotted overrides. A run has no other source of configuration.

Invariant: a relative path in the file is resolved against its folder, one in an override against the working directory, so the
file means the same wherever a run starts. An error names the expected value, for an unknown key also the nearest known one.
"""

import difflib
import os
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from polyreme.config.named_input import nameable, split_name
from polyreme.config.reward import RewardConfig
from polyreme.config.run import RunConfig
from polyreme.config.section import Section, holds_path, known_keys, required_keys, subsections, words
from polyreme.config.stage import STAGES, StageConfig
from polyreme.config.upgrade import OLD_KEYS, REWRITE
from polyreme.config.yaml_text import Tree, load_yaml
from polyreme.errors import ConfigError

AnySection = TypeVar("AnySection", bound=Section)


class _RewardFile(Section):
    reward: RewardConfig


class _Name(str):
    """A text that was found to be a name where it was given, and stays one."""


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a run's YAML file and applies `a.b=value` overrides (values in YAML syntax).

    Relative paths in the file are resolved against the file's folder, those in overrides against the working directory.

    Raises:
        ConfigError: the file is missing or is not YAML, a key is unknown, or a value is invalid.
    """
    config = load_any(path, overrides)
    if isinstance(config, StageConfig):
        raise ConfigError(
            f"the configuration of a run in {path}", f"stage: {config.stage}", f"Start it with `polyreme {config.stage}`."
        )
    return config


def load_stage(path: Path, overrides: Iterable[str], stage: str) -> StageConfig:
    """Reads the YAML file of `stage`, as `load_config` reads a run's. Raises ConfigError, also for a file of another kind."""
    config = load_any(path, overrides)
    if not isinstance(config, StageConfig):
        raise ConfigError(
            f"stage: {stage} in {path}", "the configuration of a run", f"Add `stage: {stage}`, or use `polyreme up`."
        )
    if config.stage != stage:
        raise ConfigError(f"stage: {stage} in {path}", f"stage: {config.stage}", f"Start it with `polyreme {config.stage}`.")
    return config


def load_any(path: Path, overrides: Iterable[str] = ()) -> RunConfig | StageConfig:
    """Reads the YAML file of a run, or of the stage that its key `stage` names, as `load_config` does. Raises ConfigError."""
    return load_as(_schema(_read_tree(path), path), path, overrides)


def load_as(schema: type[AnySection], path: Path, overrides: Iterable[str] = ()) -> AnySection:
    """Reads a YAML file of one schema, as `load_config` reads a run's. Raises ConfigError."""
    tree = _read_tree(path)
    resolve_paths(tree, schema, path.resolve().parent)
    for override in overrides:
        resolve_paths(tree := _override(tree, override), schema, Path.cwd())
    return parse(tree, str(path), schema)


def parse_any(tree: dict[str, object], path: Path) -> RunConfig | StageConfig:
    """Validates the tree of a run, or of the stage that its `stage` names, without resolving paths. `path` names it in errors."""
    return parse(tree, str(path), _schema(tree, path))


def _schema(tree: dict[str, object], path: Path) -> type[RunConfig] | type[StageConfig]:
    stage = tree.get("stage")
    if stage is None:
        return RunConfig
    if not isinstance(stage, str) or stage not in STAGES:
        raise ConfigError(f"stage: {' or '.join(STAGES)} in {path}", repr(stage), "Use one of these, or remove the key.")
    return STAGES[stage]


def load_reward_config(path: Path) -> RewardConfig:
    """The `reward` section of a YAML file, which may contain a whole run or only this section. Raises as `load_config`."""
    tree = _read_tree(path)
    if set(tree) != {"reward"}:
        if (section := load_config(path).reward) is None:
            raise ConfigError(f"a section `reward` in {path}", "none: the run only distils a teacher", "Add the section.")
        return section
    return load_as(_RewardFile, path).reward


def data_columns(path: Path) -> tuple[str, str]:
    """The prompt and label columns of a run's data; `prompt` and `label` when the file holds only a `reward` section.

    Raises the errors of `load_config`.
    """
    if set(_read_tree(path)) == {"reward"}:
        return "prompt", "label"
    data = load_config(path).data
    return data.prompt_key, data.label_key


def parse_config(tree: dict[str, object], source: str) -> RunConfig:
    """Validates a run's tree of plain values. `source` names its origin in errors. Raises ConfigError."""
    return parse(tree, source, RunConfig)


def parse(tree: dict[str, object], source: str, schema: type[AnySection]) -> AnySection:
    """Validates a tree of plain values against `schema`. `source` names its origin in errors. Raises ConfigError."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            f"a valid configuration in {source}", "; ".join(_explain(e, schema) for e in error.errors()), "Fix these keys."
        ) from None


def _read_tree(path: Path) -> dict[str, object]:
    advice = "Pass the path of a run's or a stage's YAML file; `polyreme init FOLDER` writes a first run.yaml."
    try:
        tree = load_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"a configuration file {path}", "no such file", advice) from None
    except OSError as error:
        if (path / "config.yaml").is_file():
            advice = f"That of this run is {path / 'config.yaml'}."
        raise ConfigError(f"a configuration file {path}", str(error.strerror), advice) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"YAML in {path}", str(error).replace("\n", " "), "Fix the file.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"a mapping of keys in {path}", type(tree).__name__, "Start from a file under examples/.")
    return tree


def _override(tree: Tree, override: str) -> Tree:
    key, equals, text = override.partition("=")
    if not equals or not key:
        advice = (
            "The configuration selects the run: name=NAME, output_dir=DIR." if Path(override).is_dir() else "Write key=value."
        )
        raise ConfigError("an override like trainer.optimizer.lr=1e-4", repr(override), advice)
    try:
        value = load_yaml(text, f"the override of {key}")
    except yaml.YAMLError:
        value = text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+e[-+]?\d+", value):  # YAML 1.1 reads 1e-4 as text
        value = float(value)
    node: Any = tree
    *parents, last = key.split(".")
    try:
        for parent in parents:
            if isinstance(node, dict) and node.get(parent) is None:  # the section is absent or null
                node[parent] = {}
            node = node[parent if isinstance(node, dict) else int(parent)]
        node[last if isinstance(node, dict) else int(last)] = value
    except (IndexError, TypeError, ValueError):  # no such row, not a row number, or a scalar
        raise ConfigError(
            f"a section or list that holds {key}",
            f"{node!r:.80}",
            "Use a key of the schema, or replace the whole value: a.b=[...].",
        ) from None
    return tree


def resolve_paths(tree: Tree, section: type[Section], base: Path) -> None:
    """Makes a tree's relative paths absolute, in place. Runs before validation, so it skips values that do not fit the schema."""
    for name, field in section.model_fields.items():
        if holds_path(field) and isinstance(field.default, Path):
            tree.setdefault(name, str(field.default))
        value, inner = tree.get(name), subsections(field)
        resolved = _resolved if nameable(field.metadata) is None else _resolved_or_name
        if holds_path(field) and isinstance(value, str):
            tree[name] = resolved(value, base)
        elif holds_path(field) and isinstance(value, list):
            kept = words(field)
            tree[name] = value = [resolved(each, base) if isinstance(each, str) and each not in kept else each for each in value]
        if inner:
            nodes = [node for node in (value if isinstance(value, list) else [value]) if isinstance(node, dict)]
            for node, kind in product(nodes, inner):
                resolve_paths(node, kind, base)


def _resolved(path: str, base: Path) -> str:
    try:
        return str((base / Path(path).expanduser()).resolve())
    except (ValueError, RuntimeError):  # a NUL, which validation refuses, another user's unknown home, or a circle of links
        return str(base / path)


def _resolved_or_name(path: str, base: Path) -> str:
    """The absolute path, or the text itself if it can only be a name: no file has it, and no folder or script could make one."""
    if isinstance(path, _Name):
        return path
    folder = path.partition("/")[0]
    is_ours = any(os.path.exists(base / name) for name in (path, folder, "prepare.py"))
    return _Name(path) if split_name(path) is not None and not is_ours else _resolved(path, base)


def _explain(error: ErrorDetails, schema: type[Section]) -> str:
    dotted = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        if dotted in OLD_KEYS:
            return f"old key {dotted} ({REWRITE})"
        near = _nearest(".".join(str(part) for part in error["loc"] if not isinstance(part, int)), schema)
        return f"unknown key {dotted}" + (f" (did you mean {near}?)" if near else "")
    if error["type"] == "missing":
        inner = [key for key in required_keys(schema) if key.startswith(f"{dotted}.")]
        return f"{dotted} is missing" + (f", with {', '.join(inner)}" if inner else "")
    found = f", found {error['input']!r:.80}"
    return f"{dotted or 'run'}: {error['msg'].removeprefix('Value error, ').removesuffix('.')}{found if dotted else ''}"


def _nearest(key: str, schema: type[Section]) -> str | None:
    """The known key most similar to `key`, else one whose last part is similar: the key may be right and its section wrong."""
    names = list(known_keys(schema))
    if near := difflib.get_close_matches(key, names, n=1):
        return near[0]
    last = key.rpartition(".")[2]
    return next((name for name in names if difflib.get_close_matches(last, [name.rpartition(".")[2]], cutoff=0.75)), None)
