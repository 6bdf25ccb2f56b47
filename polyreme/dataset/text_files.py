"""Readers of text files: JSON lines, one JSON array, and comma- or tab-separated values.

Invariant: a row is a JSON object, and every error names its file and line. JSON lines and CSV are read lazily.
"""

import csv
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from polyreme.dataset.reading import advance
from polyreme.dataset.strict_json import DEEPEST, TooDeep, half_character, value_in
from polyreme.errors import DataError

_LONGEST_CELL = 1 << 27
"""Maximum characters of a CSV cell. The csv module's own limit is 131,072, shorter than some documents."""
_OTHERS = {
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
"""The beginnings of files that are no text in UTF-8."""
_SPACES = (" ", "\t", "\r", "\n")


Fields = Mapping[str, Any]
"""The columns of a row."""


class Row(NamedTuple):
    """One row of a data file. `where` names file and line in errors."""

    where: str
    fields: Fields


def read_json(path: Path) -> Iterator[Row]:
    """The rows of a JSON file: one object per line, or one array of objects. Skips blank lines. Raises DataError."""
    if _begins_with_array(path):
        yield from _read_array(path)
        return
    for number, line in _lines(path):
        if line.strip():
            where = f"{path}:{number}"
            yield Row(where, _object(_parsed(line, where), line, where))


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
                header = cells
                if repeated := sorted({name for name in cells if cells.count(name) > 1}):
                    raise DataError(
                        f"one column of each name in {where}",
                        f"several of {', '.join(map(repr, repeated))}",
                        "Rename the others.",
                    )
            elif cells:
                if len(cells) != len(header):
                    raise DataError(f"{len(header)} values, one per column, in {where}", str(len(cells)), "Fix the line.")
                yield Row(where, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"CSV in {path}:{reader.line_num}", str(error), "Fix the line.") from None


def _begins_with_array(path: Path) -> bool:
    return next((line.lstrip()[0] == "[" for _, line in _lines(path) if line.strip()), False)


def _read_array(path: Path) -> Iterator[Row]:
    """The elements of the array, read one by one, so that an error names its element and line."""
    text = "".join(line for _, line in _lines(path))
    place, number, line = _skip(text, text.index("[") + 1), 0, 1
    line += text.count("\n", 0, place)
    ended = text[place : place + 1] == "]"
    while not ended:
        number += 1
        where = f"{path} element {number} in line {line}"
        fields, end = _parsed_at(text, place, where)
        yield Row(f"{path} element {number}", _object(fields, text[place:end], where))
        begin, place = place, _skip(text, end)
        ended = text[place : place + 1] == "]"
        if not ended and text[place : place + 1] != ",":
            found = f"{text[place : place + 20]!r}" if place < len(text) else "the end of the file"
            raise DataError(f"a comma or the end of the JSON array after {where}", found, "Fix the file.")
        place = place if ended else _skip(text, place + 1)
        line += text.count("\n", begin, place)
    if rest := text[place + 1 :].strip():
        raise DataError(f"the end of {path} after its JSON array", f"{rest:.40}", "Write one array, or one object per line.")


def _skip(text: str, place: int) -> int:
    """The next place without white space."""
    while text[place : place + 1] in _SPACES:
        place += 1
    return place


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The number and the text of each line. A string may contain line endings other than \\n."""
    number = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                advance(len(line))
                if number == 1 and (other := next((name for mark, name in _OTHERS.items() if line.startswith(mark)), None)):
                    do = (
                        "Decompress it."
                        if "archive" in other
                        else f"Rename it to .{other.split()[1].lower()}."
                        if "file" in other
                        else "Save it as UTF-8."
                    )
                    raise DataError(f"text in UTF-8 in {path}", other, do)
                yield number, (line.removeprefix(BOM_UTF8) if number == 1 else line).decode()
    except OSError as error:
        raise DataError(f"a data file at {path}", error.strerror or str(error), "Fix the path in `data`.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"UTF-8 text in {path}:{number}", str(error), "Save the file as UTF-8.") from error


def _object(fields: object, text: str, where: str) -> dict[str, object]:
    """The object read from `text`. Raises DataError for another value, and for characters and depths that cannot go on."""
    if "\\u" in text and (half := half_character(fields)):
        raise DataError(f"complete characters in {where}", f"{half}, half of a surrogate pair", "Fix the text: it was cut there.")
    if not isinstance(fields, dict):
        raise DataError(f"a JSON object in {where}", type(fields).__name__, "Write one object per line, or one array of objects.")
    return fields


def _parsed(text: str, where: str) -> object:
    """The value of a JSON text."""
    value, end = _parsed_at(text, _skip(text, 0), where)
    if rest := text[end:].strip():
        raise DataError(f"one JSON object in {where}", f"more after it: {rest:.40}", "Write one object per line.")
    return value


def _parsed_at(text: str, place: int, where: str) -> tuple[object, int]:
    """The JSON value at a place of `text` and its end. Raises DataError for what is no JSON, or what no other part could read."""
    try:
        return value_in(text, place)
    except json.JSONDecodeError as error:
        column = error.pos - text.rfind("\n", 0, error.pos)
        raise DataError(
            f"a JSON object in {where}",
            f"{error.msg} at column {column}",
            "Fix the line: a file has one object per line, or is one array of objects.",
        ) from None
    except TooDeep:
        raise DataError(f"at most {DEEPEST} levels of nesting in {where}", "more", "Write the inner value as text.") from None
    except ValueError as error:
        raise DataError(f"a JSON object in {where}", str(error).partition(";")[0], "Fix the line.") from None
