"""Renders an import as the text of a run.yaml.

Invariant: the text has every value with its origin as a comment, and lists every key without a counterpart. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys
from polyreme.import_config.rules import Imported


def text_of(found: Imported, title: str, file: str) -> str:
    """The YAML text; `title` and `file` name the origin of the values."""
    checks = sum("CHECK" in comment for comment in found.comments.values())
    lines = [
        f"# Imported from {title}: {file}",
        "# The comment of a key has its origin: the other key, its value where it was translated, and how.",
    ]
    if checks:
        lines.append(f"# {checks} comments say CHECK: decide on these keys before a run.")
    lines.append("")
    lines += _lines(_tree(found.values), "", found.comments, "")
    if found.parts:
        lines += ["", "# Read for other keys:"]
        lines += [f"# {entry.key}: {_flow(entry.value)} -- {entry.note.removeprefix('read for ')}" for entry in found.parts]
    if found.missing:
        lines += ["", "# Without a counterpart:"]
        lines += [f"# {entry.key}: {_flow(entry.value)} -- {entry.note}" for entry in found.missing]
    return "\n".join(lines) + "\n"


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    order = {key: place for place, key in enumerate(["algorithm.preset", *known_keys(RunConfig)])}
    tree: dict[str, Any] = {name: {} for name in RunConfig.model_fields}
    for key, value in sorted(values.items(), key=lambda item: order.get(item[0], len(order))):
        node, (*parents, last) = tree, key.split(".")
        for parent in parents:
            node[parent] = node[parent] if isinstance(node.get(parent), dict) else {}
            node = node[parent]
        node[last] = value
    return {name: value for name, value in tree.items() if value != {}}


def _lines(tree: Mapping[str, Any], prefix: str, comments: Mapping[str, str], indent: str) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", comments, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_flow(value)}  # {comments[key]}"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return " ".join(text.removesuffix("...\n").split())
