"""Reader of JSON lines data sets, shared by the trainer, the checks before a run, and `polyreme reward test`.

Invariant: all readers interpret a row the same way, and every error names the file and the line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.errors import DataError


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, object) for each line of a JSON lines file. Skips blank lines and reads lazily.

    Raises:
        DataError: the file is missing or empty, or a line is not a JSON object.
    """
    empty = True
    for number, line in _lines(path):
        if line.strip():
            empty = False
            yield number, _object(line, f"{path}:{number}")
    if empty:
        raise DataError(f"at least one row in {path}", "none", "Write one JSON object per line.")


def lines_of(text: str) -> list[str]:
    """The lines of a JSON lines file. `splitlines` would also split at a U+2028 inside a string."""
    return text.split("\n")


def label_text(value: Any) -> str:
    """A reference answer as text.

    A string is returned unchanged, a number in JSON notation, None as ''. A list of one (PaddleNLP's `tgt`) counts as its element.

        Raises:
            TypeError: the value has another type.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    raise TypeError(f"{value!r:.80}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8", newline="\n") as file:  # a string may contain other line endings
            yield from enumerate(file, 1)
    except OSError as error:
        raise DataError(f"a JSON lines file at {path}", error.strerror or str(error), "Fix the path in `data`.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"UTF-8 text in {path}", str(error), "Save the file as UTF-8.") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"a JSON object in {where}", f"{error.msg} at column {error.colno}", "Fix the line.") from None
    if "\\u" in line:
        _check_characters(fields, where)
    if not isinstance(fields, dict):
        raise DataError(f"a JSON object in {where}", type(fields).__name__, "Write one object per line.")
    return fields


def _check_characters(fields: Any, where: str) -> None:
    """Refuses a lone surrogate. JSON can escape it, but UTF-8 cannot encode it."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise DataError(
            f"complete characters in {where}", f"{half}, half of a surrogate pair", "Fix the text: it was cut there."
        ) from None


def plain_prompt(value: Any) -> str:
    """A prompt as plain text: a string, the only string of a list (PaddleNLP's `src`), or the last user message of a chat.

    Raises:
        TypeError: the value is none of these.
    """
    if isinstance(value, str):
        return value
    messages = value if isinstance(value, Sequence) else ()
    if len(messages) == 1 and isinstance(messages[0], str):
        return messages[0]
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(f"{value!r:.80}")
    by_user = [message for message in messages if message.get("role") == "user"]
    content = (by_user or messages)[-1].get("content")
    if isinstance(content, list):  # a message of several parts: text, images, ...
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
