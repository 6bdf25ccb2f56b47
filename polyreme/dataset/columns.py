"""The values of a row's columns: dotted paths and reference answers.

Invariant: all parts of the system interpret a row the same way. Pure.
"""

import json
from collections.abc import Mapping


class TokenIds(tuple[int, ...]):
    """A text that is already token ids of the run's tokenizer."""


def value_at(fields: Mapping[str, object], key: str, default: object = None) -> object:
    """The value of a column, named by its own name or by a dotted path into it.

    `reward_model.ground_truth` is the column of this name if there is one, else `ground_truth` inside `reward_model`. A number in
    the path selects an element of a list: `messages.0.content`.
    """
    if key in fields:
        return fields[key]
    node: object = fields
    for part in key.split("."):
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return default
    return node


def column_names(fields: Mapping[str, object], prefix: str = "") -> list[str]:
    """The columns of a row, those inside a column as dotted paths, sorted."""
    found: list[str] = []
    for key, value in fields.items():
        found += column_names(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else [f"{prefix}{key}"]
    return sorted(found)


def label_text(value: object) -> str:
    """A reference answer as text.

    A string is returned unchanged, a number in JSON notation, None as ''. A list of one (PaddleNLP's `tgt`) counts as its
    element, an empty list as None.

    Raises:
        TypeError: the value has another type.
    """
    if isinstance(value, list) and len(value) < 2:
        value = value[0] if value else None
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    raise TypeError(f"{value!r:.80}")
