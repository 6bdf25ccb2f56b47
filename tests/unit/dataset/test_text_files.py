"""JSON lines, JSON arrays and CSV: what is read as it stands, and errors that name the line."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.dataset.source import read_objects
from polyreme.errors import DataError


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"a": NaN}', "NaN, which JSON does not have"),
        (b'{"a": [-Infinity]}', "-Infinity, which JSON does not have"),
        (b'{"a": 1e999}', "1e999, which is beyond"),
        (b'{"a": ' + b"9" * 4301 + b"}", "Exceeds the limit"),
        (b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}", "more"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "more"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        (b'{"a": "\\ud800"}', "half of a surrogate"),
        (b'{"\\udc00": 1}', "half of a surrogate"),
        (b'{"a": "\xff"}', "'utf-8' codec"),
        (b"\xff\xfe{\x00", "'utf-8' codec"),
        (b'{"a": 1} {"a": 2}', 'more after it: {"a": 2}'),
        (b'{"a": "x\ty"}', "Invalid control character"),
        (b'"text"', "str"),
        (b"null", "NoneType"),
        (b"{'a': 1}", "Expecting property name"),
    ],
)
def test_a_line_that_json_does_not_have_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 0}\n\n' + line + b"\n")
    rows = read_objects(tmp_path / "rows.jsonl")
    assert next(rows).fields == {"a": 0}
    with pytest.raises(DataError) as caught:
        next(rows)
    assert "rows.jsonl:3" in caught.value.expected and found in caught.value.found


def test_what_other_programs_write_is_read(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(199):
        deep = [deep]
    row = {"a": "\u2028 \x00 \U0001f600", "n": 10**300, "deep": deep}
    text = json.dumps(row).replace("\\ud83d\\ude00", "\U0001f600")
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\r\n  \n" + text.encode())
    (tmp_path / "rows.json").write_bytes(b"\xef\xbb\xbf\r\n [" + text.encode() + b" ,\n" + text.encode() + b"]\n")
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbfa,b\r\n1,x\x00y\r\n")
    assert [each.fields for name in ("rows.jsonl", "rows.json") for each in read_objects(tmp_path / name)] == [row] * 4
    assert next(read_objects(tmp_path / "rows.csv")).fields == {"a": "1", "b": "x\x00y"}
