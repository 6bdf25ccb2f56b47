"""From a YAML file and dotted overrides to a checked configuration; nothing else configures a run.

An error names what was expected, unknown keys with the nearest known one. Paths are resolved against the YAML file's folder, so
that a run does not depend on where it was started.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from polyreme.config import RewardConfig, RunConfig
from polyreme.errors import ConfigError

_PATHS = (
    *("output_dir", "model.path", "data.train", "data.eval"),
    *("reward.security.certificate", "reward.security.key", "reward.security.ca"),
    *("security.certificate", "security.key", "security.ca"),
)
_LISTED_PATHS = (
    ("trainer", "sft", ("data",)),
    ("reward", "rewards", ("file", "model", "security.ca", "security.certificate", "security.key")),
)


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a run's YAML file and applies `a.b=value` overrides (values in YAML syntax).

    Relative paths in the file are taken from the file's folder, those in overrides from the working directory.

    Raises:
        ConfigError: the file is missing or is not YAML, a key is unknown (the nearest is named), a value does not fit.
    """
    tree = _read_tree(path)
    _resolve_paths(tree, path.resolve().parent)
    for override in overrides:
        _resolve_paths(tree := _override(tree, override), Path.cwd())
    return parse_config(tree, str(path))


def load_reward_config(path: Path) -> RewardConfig:
    """The `reward` section of a YAML file: of a whole run's, or of one with nothing else in it. Raises as load_config."""
    tree = _read_tree(path)
    if set(tree) != {"reward"}:
        return load_config(path).reward
    _resolve_paths(tree, path.resolve().parent)
    try:
        return RewardConfig.model_validate(tree["reward"])
    except ValidationError as error:
        problems = [{**e, "loc": ("reward", *e["loc"])} for e in error.errors()]
        raise ConfigError(f"a valid reward section in {path}", "; ".join(map(_explain, problems)), "Mend these keys.") from None


def data_columns(path: Path) -> tuple[str, str]:
    """The columns of prompt and label in the data of a run's YAML file; `prompt` and `label` of one without a run. Raises as load_config."""
    if set(_read_tree(path)) == {"reward"}:
        return "prompt", "label"
    data = load_config(path).data
    return data.prompt_key, data.label_key


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            "a run configuration", f"no file {path}", "Give the path of a YAML file, such as one under examples/."
        ) from None
    except OSError as error:
        raise ConfigError(
            "a run configuration", f"{path}: {error.strerror}", "Give the path of a YAML file, such as one under examples/."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"YAML in {path}", str(error).replace("\n", " "), "Mend the file.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"a mapping of keys in {path}", type(tree).__name__, "Start from a file under examples/.")
    return tree


def parse_config(tree: dict[str, Any], source: str) -> RunConfig:
    """The checked configuration of a tree of plain values; `source` names its origin in errors. Raises ConfigError."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            f"a valid configuration in {source}", "; ".join(_explain(e) for e in error.errors()), "Mend these keys."
        ) from None


def _override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError("an override like trainer.optimizer.lr=1e-4", repr(override), "Write key=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+e[-+]?\d+", value):  # YAML 1.1 reads 1e-4 as text
        value = float(value)
    node: Any = tree
    *parents, last = key.split(".")
    try:
        for parent in parents:
            node = node.setdefault(parent, {}) if isinstance(node, dict) else node[int(parent)]
        node[last if isinstance(node, dict) else int(last)] = value
    except (IndexError, TypeError, ValueError):  # no such row, no number for one, or a value that has no parts
        raise ConfigError(
            f"a place for {key}", f"{node!r:.80} on the way to it", "Name a key of the schema, or replace the whole: a.b=[...]."
        ) from None
    return tree


def _resolve_paths(tree: dict[str, Any], base: Path) -> None:
    """Makes the tree's relative paths absolute, in place."""
    places: list[tuple[Any, ...]] = [(tree, *dotted.split(".")) for dotted in _PATHS]
    for section, rows, keys in _LISTED_PATHS:
        listed = (tree.get(section) or {}).get(rows) if isinstance(tree.get(section), dict) else None
        places += [(row, *key.split(".")) for row in listed or [] if isinstance(row, dict) for key in keys]
    tree.setdefault("output_dir", "runs")
    for node, *parents, last in places:
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(node.get(last), str):
            node[last] = str((base / Path(node[last]).expanduser()).resolve())


def known_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from known_keys(kind, f"{prefix}{name}.")


def _explain(error: Any) -> str:
    dotted = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        plain = ".".join(str(part) for part in error["loc"] if not isinstance(part, int))
        names = list(known_keys())
        near = (
            difflib.get_close_matches(plain, names, n=1)
            or [
                name
                for name in names
                if difflib.get_close_matches(plain.rsplit(".", 1)[-1], [name.rsplit(".", 1)[-1]], cutoff=0.75)
            ][:1]
        )
        return f"unknown key {dotted}" + (f" (did you mean {near[0]}?)" if near else "")
    found = "" if error["type"] == "missing" else f", found {error['input']!r:.80}"
    return f"{dotted or 'run'}: {error['msg'].removeprefix('Value error, ')}{found if dotted else ''}"
