"""JSON as every later reader and writer of a row can use it.

Invariant: files and JSON texts in rows are read by the same rules. What Python's reader accepts beyond JSON is an error. Pure.
"""

import json
import math
from collections.abc import Mapping

from polyreme.errors import DataError

DEEPEST = 200
"""Maximum levels of nesting."""


class TooDeep(ValueError):
    """A value has more levels of nesting than DEEPEST."""


def value_in(text: str, place: int) -> tuple[object, int]:
    """The JSON value at a place of `text`, and its end.

    Raises:
        json.JSONDecodeError: the text is no JSON.
        TooDeep: the value is nested too deeply.
        ValueError: another part could not read the value: a key twice, NaN, infinity, or an integer beyond Python's limit.
    """
    try:
        value, end = _DECODER.raw_decode(text, place)
    except RecursionError:
        raise TooDeep(f"more than {DEEPEST} levels of nesting") from None
    if text.count("{", place, end) + text.count("[", place, end) > DEEPEST and _is_deep(value):
        raise TooDeep(f"more than {DEEPEST} levels of nesting")
    return value, end


def whole_value(text: str) -> object:
    """The JSON value that is all of a text. Raises as `value_in`, and ValueError for more after it."""
    value, end = value_in(text, len(text) - len(text.lstrip()))
    if rest := text[end:].strip():
        raise ValueError(f"more after it: {rest:.40}")
    return value


def half_character(value: object) -> str | None:
    """A lone surrogate of the value, escaped, or None. JSON can escape it, but UTF-8 cannot encode it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return error.object[error.start].encode("unicode_escape").decode()
    return None


def from_text(value: object, what: str, do: str = "Fix the row.") -> object:
    """The value of a JSON text in a row; another value, and an empty text, as it is. Raises DataError."""
    if not isinstance(value, str) or not value:
        return value
    try:
        found = whole_value(value)
    except ValueError as error:
        raise DataError(f"JSON text as {what}", f"{value:.80} ({str(error).partition(';')[0]})", do) from None
    if "\\u" in value and (half := half_character(found)):
        raise DataError(f"complete characters in {what}", f"{half}, half of a surrogate pair", do)
    return found


def messages_of(value: object, what: str) -> object:
    """The messages of a JSON text, as CSV and columns of texts have them; another value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("[") or not value.lstrip()[1:].lstrip().startswith("{"):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if all(isinstance(each, Mapping) and each.keys() & {"role", "from"} and each.keys() & {"content", "value"} for each in found):
        return from_text(value, what)
    return value


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, dict | list) for each in level)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in one object")
    return fields


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text:.40}, which is beyond the numbers of JSON's readers")
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}, which JSON does not have. A missing value is null")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)
