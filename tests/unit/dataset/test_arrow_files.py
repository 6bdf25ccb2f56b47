"""Every type of an Arrow column: a value that JSON has, or an error that names file, column and row."""

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from polyreme.dataset.source import read_objects
from polyreme.errors import DataError


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


COLUMNS: dict[str, tuple[Any, Any]] = {
    "uuid": (pa.array([bytes(range(16))], pa.uuid()), "00010203-0405-0607-0809-0a0b0c0d0e0f"),
    "map": (pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int32())), {"a": 1, "b": None}),
    "map of times": (pa.array([[(7, 1)]], pa.map_(pa.int32(), pa.timestamp("s"))), {"7": "1970-01-01T00:00:01"}),
    "no map": (pa.array([[]], pa.map_(pa.string(), pa.int32())), {}),
    "map in a list": (pa.array([[[("a", "b")]]], pa.list_(pa.map_(pa.string(), pa.string()))), [{"a": "b"}]),
    "half": (pa.array([np.float16(1.5)]), 1.5),
    "nan": (pa.array([float("nan")]), None),
    "nan in a struct": (pa.array([{"x": [float("nan"), 1.0]}]), {"x": [None, 1.0]}),
    "runs": (pa.RunEndEncodedArray.from_arrays([1], ["a"]), "a"),
    "dictionary": (pa.array(["a"]).dictionary_encode(), "a"),
    "large text": (pa.array(["a"], pa.large_string()), "a"),
    "text view": (pa.array(["a"], pa.string_view()), "a"),
    "list view": (pa.array([["a"]], pa.list_view(pa.string())), ["a"]),
    "large list": (pa.array([["a"]], pa.large_list(pa.string())), ["a"]),
    "fixed list": (pa.array([[1, 2]], pa.list_(pa.int32(), 2)), [1, 2]),
    "union": (
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["x"]), pa.array([1])]),
        "x",
    ),
    "seconds": (pa.array([90], pa.duration("s")), 90.0),
    "zone": (pa.array([1], pa.timestamp("s", "Europe/Paris")), "1970-01-01T01:00:01+01:00"),
    "time": (pa.array([datetime.time(1, 2)], pa.time64("us")), "01:02:00"),
    "day": (pa.array([86_400_000], pa.date64()), "1970-01-02"),
    "decimal": (pa.array([Decimal("1.50")], pa.decimal256(50, 2)), "1.50"),
    "json": (pa.array(['{"a": 1}'], pa.json_()), '{"a": 1}'),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())), True),
    "opaque": (pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "t", "v"), pa.array(["x"])), "x"),
    "null": (pa.nulls(1), None),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_of_any_type_has_what_json_has(tmp_path: Path, name: str) -> None:
    column, value = COLUMNS[name]
    write_stream(tmp_path / "rows.arrow", pa.table({"n": pa.array([1]), "x": column}))
    (row,) = read_objects(tmp_path / "rows.arrow")
    assert row.fields == {"n": 1, "x": value} and json.loads(json.dumps(row.fields, allow_nan=False)) == row.fields


def text_of_bytes(data: bytes) -> pa.Array:
    ends = pa.array([0, 0, len(data)], pa.int32())
    return pa.Array.from_buffers(pa.string(), 2, [None, ends.buffers()[1], pa.py_buffer(data)])


REFUSED: dict[str, Any] = {
    "bytes": pa.array([b"a", b"b"], pa.large_binary()),
    "fixed bytes": pa.array([b"a", b"b"], pa.binary(1)),
    "bytes of a dictionary": pa.array([b"a", b"b"]).dictionary_encode(),
    "bytes of an extension": pa.ExtensionArray.from_storage(pa.opaque(pa.binary(), "t", "v"), pa.array([b"x", b"y"])),
    "no UTF-8": text_of_bytes(b"\xff\xfe"),
    "infinite": pa.array([0.0, float("inf")]),
    "infinite in a list": pa.array([[0.0], [float("-inf")]]),
    "beyond the year 9999": pa.array([0, 2**50], pa.timestamp("s")),
    "an unknown zone": pa.array([None, 1], pa.timestamp("s", "No/Where")),
    "days beyond": pa.array([0, 2**30], pa.date32()),
    "seconds beyond": pa.array([0, 2**50], pa.duration("s")),
    "an interval": pa.array([None, (1, 2, 3)], pa.month_day_nano_interval()),
    "a key twice": pa.array([[], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int32())),
    "two keys of one text": pa.array([[], [(1, 1), (1, 2)]], pa.map_(pa.int32(), pa.int32())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_json_does_not_have_is_named(tmp_path: Path, name: str) -> None:
    write_stream(tmp_path / "rows.arrow", pa.table({"n": pa.array([1, 2]), "x": REFUSED[name]}))
    with pytest.raises(DataError) as caught:
        list(read_objects(tmp_path / "rows.arrow"))
    message = str(caught.value)
    assert "'x'" in message and "rows.arrow" in message and ("row 2" in message or "from row 1 on" in message)


def test_a_column_twice_is_refused(tmp_path: Path) -> None:
    write_stream(tmp_path / "rows.arrow", pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]))
    with pytest.raises(DataError, match="several of x"):
        list(read_objects(tmp_path / "rows.arrow"))
