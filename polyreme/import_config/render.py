"""Renders an import as the text of a run.yaml.

Invariant: the text begins with what was not carried over and what the user must decide. It has every value with its origin as a
comment, and every other key in a list. Pure.
"""

from collections.abc import Iterator, Mapping

import yaml

from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys
from polyreme.config.yaml_text import Tree
from polyreme.import_config.application import Entry, Imported
from polyreme.import_config.rules import Fate


def text_of(found: Imported, title: str, file: str) -> str:
    """The YAML text; `title` and `file` name the origin of the values."""
    lines = [
        f"# Imported from {title}: {file}",
        *(f"# {line}" for line in report(found, title)),
        "# The comment of a key has its origin: the other key, its value where it was translated, and how.",
        "",
        *_lines(_tree(found.values), "", found.comments, ""),
    ]
    for heading, entries in (("Read for other keys", found.parts), ("No effect on training", found.idle)):
        if entries:
            lines += ["", f"# {heading}:"]
            lines += [f"# {entry.key}: {_flow(entry.value)} -- {entry.note or entry.target}" for entry in entries]
    return "\n".join(lines) + "\n"


def report(found: Imported, title: str) -> list[str]:
    """What the user must know before a run: the losses, then the keys to decide on."""
    lines = []
    if found.lost:
        lines.append(f"NOT CARRIED OVER ({len(found.lost)}): this run trains differently from the original of {title} in:")
        lines += [f"- {entry.key}{_value(entry)} -- {_reason(entry)}" for entry in found.lost]
    checks = {key: comment for key, comment in found.comments.items() if "CHECK" in comment}
    if checks:
        lines.append(f"CHECK ({len(checks)}): decide on these keys before a run:")
        lines += [f"- {key}: {_flow(found.values[key])} -- {comment}" for key, comment in checks.items()]
    return lines or [f"Everything that changes training was carried over from {title}."]


def _value(entry: Entry) -> str:
    return "" if entry.value is None else f": {_flow(entry.value)}"


def _reason(entry: Entry) -> str:
    return f"ANOTHER KIND OF RUN: {entry.note}" if entry.fate is Fate.ANOTHER_RUN else entry.note


def _tree(values: Mapping[str, object]) -> Tree:
    order = {key: place for place, key in enumerate(known_keys(RunConfig))} | {"algorithm.preset": -1}
    tree: Tree = {name: {} for name in RunConfig.model_fields}
    for key, value in sorted(values.items(), key=lambda item: order.get(item[0], len(order))):
        node, (*parents, last) = tree, key.split(".")
        for parent in parents:
            node[parent] = node[parent] if isinstance(node.get(parent), dict) else {}
            node = node[parent]
        node[last] = value
    return {name: value for name, value in tree.items() if value != {}}


def _lines(tree: Mapping[str, object], prefix: str, comments: Mapping[str, str], indent: str) -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, f"{key}.", comments, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_flow(value)}  # {comments[key]}"


def _flow(value: object) -> str:
    text = yaml.safe_dump(
        str(value) if isinstance(value, str) else value, default_flow_style=True, allow_unicode=True, width=10_000
    )
    return " ".join(text.removesuffix("...\n").split())
