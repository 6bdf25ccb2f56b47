"""JSON lines, JSON arrays and CSV: what is read as it stands, and errors that name the line."""

import bz2
import gzip
import json
import lzma
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
        (b"\xff\xfe{\x00", "'utf-8' codec"),  # at the beginning of the file it would be UTF-16
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


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (gzip.compress(b'{"a": 1}', mtime=0), "a gzip archive"),
        (bz2.compress(b'{"a": 1}'), "a bzip2 archive"),
        (lzma.compress(b'{"a": 1}'), "an xz archive"),
        (b"\x28\xb5\x2f\xfd", "a zstd archive"),
        (b"PK\x03\x04", "a zip archive"),
        (b"PAR1\x15", "a Parquet file"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16 text"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError) as caught:
        next(read_objects(tmp_path / "rows.jsonl"))
    assert caught.value.found == found


def test_a_compressed_file_of_a_directory_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    (tmp_path / ".b.jsonl").write_text("hidden")
    assert [each.fields for each in read_objects(tmp_path)] == [{"a": 1}]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"a": 2}', mtime=0))
    with pytest.raises(DataError, match="gz"):
        list(read_objects(tmp_path))


def test_a_path_may_have_wildcards_in_any_part(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(f'{{"a": "{name}"}}')
        (tmp_path / name / "[x]?.jsonl").write_text(f'{{"b": "{name}"}}')
    assert [each.fields for each in read_objects(tmp_path / "*" / "rows.jsonl")] == [{"a": "one"}, {"a": "two"}]
    assert [each.fields for each in read_objects(tmp_path / "one" / "row?.json*")] == [{"a": "one"}]
    assert [each.fields for each in read_objects(tmp_path / "one" / "[x]?.jsonl")] == [{"b": "one"}]
