"""Reads configuration files of other systems: YAML, JSON, and shell scripts with a command line.

Invariant: the result is the file's plain values by dotted key. Nothing is executed.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from polyreme.config.yaml_text import load_yaml
from polyreme.errors import ConfigError
from polyreme.import_config.rules import flatten

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_values(path: Path) -> dict[str, Any]:
    """The values of a file. Values that refer to other keys (`${...}`) are omitted, since those keys have them.

    Raises:
        ConfigError: the file is missing, or neither YAML, JSON nor a script with options.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a configuration at {path}", str(error), "Name a YAML file, a JSON file or a shell script.") from None
    if path.suffix in (".yaml", ".yml", ".json"):
        values = dict(flatten(_load(text, path)))
    else:
        values = _options(text)
    if not values:
        raise ConfigError(f"options in {path}", "none", "Name a YAML file, a JSON file or a shell script.")
    return {key: _plain(value) for key, value in values.items() if not _refers(value)}


def _load(text: str, path: Path) -> Mapping[str, Any]:
    try:
        tree = load_yaml(text, str(path))  # JSON is YAML
    except yaml.YAMLError as error:
        raise ConfigError(f"YAML or JSON in {path}", str(error).replace("\n", " "), "Fix the file.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"a mapping of keys in {path}", type(tree).__name__, "Name a configuration file.")
    return tree


def _options(text: str) -> dict[str, Any]:
    """`a.b=value` and `--a_b value` of a script; an option without a value is true. Positional words are omitted, and so are
    all words before the name of the other system's module."""
    words: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words += shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines is not a command line
            continue
    starts = [place for place, word in enumerate(words) if re.match(r"(openrlhf|verl)\.", word)]
    words = words[starts[0] + 1 :] if starts else words
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            following = []
            for other in words[place + 1 :]:
                if other.startswith("--") or "$@" in other:
                    break
                following.append(other)
            found[key] = _value(value) if equals else _values(following)
        elif match := re.fullmatch(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", word):
            found[match[1]] = _value(match[2])
    return found


def _values(words: list[str]) -> Any:
    return True if not words else _value(words[0]) if len(words) == 1 else [_value(word) for word in words]


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _plain(value: Any) -> Any:
    """Numbers such as 1e-6, which YAML 1.1 reads as text, as numbers."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _refers(value: Any) -> bool:
    return isinstance(value, str) and (value == "???" or re.search(r"\$\{[\w.]*[.:]", value) is not None)
