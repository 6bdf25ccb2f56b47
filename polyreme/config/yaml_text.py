"""Reads YAML in which each key of a mapping stands once.

Invariant: no value of the text is dropped without an error. YAML's own readers keep the last of several equal keys, so a whole
section may disappear. Merges (`<<`) are not repetitions: a mapping's own key replaces a merged one.
"""

from collections.abc import Hashable
from typing import Any

import yaml

from polyreme.errors import ConfigError

Tree = dict[str, Any]
"""The mapping of a YAML document, before it is checked."""

_LARGEST = 1_000_000
"""Values of a document, each alias counted as what it stands for: a few lines of aliases can stand for more than any memory."""
_MERGE = "tag:yaml.org,2002:merge"


class RepeatedKeyError(ConfigError):
    """A key stands twice in one mapping."""


def load_yaml(text: str, source: str, kind: Any = yaml.SafeLoader) -> Any:
    """The plain values of a YAML document. `source` names it in errors; `kind`: the loader.

    Raises:
        RepeatedKeyError: a mapping has a key twice.
        yaml.YAMLError: the text is not one YAML document of plain values, or its aliases stand for too many.
    """
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {})
        _check_keys(loader, node, source)
        return loader.construct_document(node)
    except (ValueError, OverflowError, RecursionError) as error:  # a day such as 2026-13-01, 5,000 digits, deep nesting
        if isinstance(error, RepeatedKeyError):
            raise
        raise yaml.YAMLError("too deeply nested" if isinstance(error, RecursionError) else str(error)) from error
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """The number of values below a node, aliases resolved. `known`: sizes of nodes; None: under way. Raises yaml.YAMLError."""
    if id(node) not in known:
        known[id(node)] = None
        below: list[Any] = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []
        below += node.value if isinstance(node, yaml.SequenceNode) else []
        known[id(node)] = 1 + sum(_size(part, known) for part in below)
    size = known[id(node)]
    if size is None:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1} has an alias of what it is part of")
    if size > _LARGEST:
        raise yaml.YAMLError(f"the aliases in line {node.start_mark.line + 1} stand for more than {_LARGEST:,} values")
    return size


def _check_keys(loader: yaml.SafeLoader, root: yaml.Node, source: str) -> None:
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            waiting += [value for _, value in node.value]
            _check_mapping(loader, node, source)


def _check_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, source: str) -> None:
    lines: dict[Hashable, int] = {}
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE:
            continue
        key, line = loader.construct_object(key_node), key_node.start_mark.line + 1
        if key in lines:
            raise RepeatedKeyError(
                f"each key once in {source}",
                f"{key_node.value} in line {lines[key]} and again in line {line}",
                "Join the two, or remove one of them.",
            )
        lines[key] = line
