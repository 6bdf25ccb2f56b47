"""Readers of text files: JSON lines, one JSON array, and comma- or tab-separated values.

Invariant: a row is a JSON object, and every error names its file and line. JSON lines and CSV are read lazily.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from polyreme.dataset.reading import advance
from polyreme.errors import DataError

_LONGEST_CELL = 1 << 27
"""Maximum characters of a CSV cell. The csv module's own limit is 131,072, shorter than some documents."""


class Row(NamedTuple):
    """One row of a data file. `where` names file and line in errors."""

    where: str
    fields: dict[str, Any]


def read_json(path: Path) -> Iterator[Row]:
    """The rows of a JSON file: one object per line, or one array of objects. Skips blank lines. Raises DataError."""
    if _begins_with_array(path):
        yield from _read_array(path)
        return
    for number, line in _lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield Row(where, _object(line, where))


def read_csv(path: Path) -> Iterator[Row]:
    """The rows of a file with a header line; every value is a text. Tabs separate the values of a .tsv file. Raises DataError."""
    csv.field_size_limit(_LONGEST_CELL)
    lines = (line for _, line in _lines(path))
    reader = csv.reader(lines, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            where = f"{path}:{reader.line_num}"
            if header is None:
                header = [name.removeprefix("\ufeff") for name in cells]
            elif cells:
                if len(cells) != len(header):
                    raise DataError(f"{len(header)} values, one per column, in {where}", str(len(cells)), "Fix the line.")
                yield Row(where, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"CSV in {path}:{reader.line_num}", str(error), "Fix the line.") from None


def _begins_with_array(path: Path) -> bool:
    return next((line.lstrip()[0] == "[" for _, line in _lines(path) if line.strip()), False)


def _read_array(path: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"a JSON array in {path}", f"{error.msg} in line {error.lineno}", "Fix the file.") from None
    for number, fields in enumerate(rows, 1):
        where = f"{path} element {number}"
        _check_characters(fields, where)
        if not isinstance(fields, dict):
            raise DataError(f"a JSON object in {where}", type(fields).__name__, "Fix the element.")
        yield Row(where, fields)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8", newline="\n") as file:  # a string may contain other line endings
            for number, line in enumerate(file, 1):
                advance(len(line) if line.isascii() else len(line.encode(errors="replace")))
                yield number, line
    except OSError as error:
        raise DataError(f"a data file at {path}", error.strerror or str(error), "Fix the path in `data`.") from error
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
