"""Readers of Parquet and Arrow files.

Invariant: a row has the values that it would have in JSON lines. Files are mapped and read in batches, so one may exceed memory.
"""

import datetime
import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

from polyreme.dataset.reading import advance
from polyreme.dataset.text_files import Row
from polyreme.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 1024
_PLAIN = ("string", "large_string", "int", "uint", "bool", "null")
"""Beginnings of the names of types whose values are the same in JSON."""
_NO_VALUE = (ValueError, LookupError, ArithmeticError, TypeError, NotImplementedError)
"""pyarrow's errors for values that Python lacks: text that is not UTF-8, a time after the year 9999, a repeated key of a map."""


def read_parquet(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file. Raises DataError."""
    yield from _rows(path, _parquet_batches(path))


def read_arrow(path: Path) -> Iterator[Row]:
    """The rows of an Arrow file, in the file format (Feather) or stream format (Hugging Face `datasets`). Raises DataError."""
    yield from _rows(path, _arrow_batches(path))


def _parquet_batches(path: Path) -> "Iterator[pa.RecordBatch]":
    from pyarrow import parquet

    with parquet.ParquetFile(path, memory_map=True) as file:  # otherwise pyarrow reads a column of a whole row group at once
        share = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=_BATCH):
            yield batch
            advance(round(share * len(batch)))


def _arrow_batches(path: Path) -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    with pa.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            mapped.seek(0)
            file = pa.ipc.open_file(mapped)
            batches: Iterable[pa.RecordBatch] = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            mapped.seek(0)
            batches = pa.ipc.open_stream(mapped)
        for batch in batches:
            yield batch
            advance(batch.nbytes)


def _rows(path: Path, batches: "Iterator[pa.RecordBatch]") -> Iterator[Row]:
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(
            f"the package pyarrow, which reads {path.name}", "none that Python finds here", "Install it: pip install pyarrow"
        ) from None
    number, plain = 0, None
    try:
        for batch in batches:
            plain = _plain_columns(batch.schema, path) if plain is None else plain
            for start in range(0, len(batch), _BATCH):  # a batch of an Arrow file may have any size
                part = batch.slice(start, _BATCH)
                for fields in _values(part, path, number):
                    number += 1
                    where = f"{path} row {number}"
                    yield Row(
                        where, {name: value if name in plain else _as_json(value, name, where) for name, value in fields.items()}
                    )
    except FileNotFoundError:
        raise DataError(f"a data file at {path}", "no such file", "Fix the path in `data`.") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"a readable {path.suffix.lstrip('.')} file at {path}", f"{error!s:.200}", "Write or download the file again."
        ) from error


def _plain_columns(schema: "pa.Schema", path: Path) -> frozenset[str]:
    """The columns whose values are the same in JSON. Raises DataError for a repeated name and for columns of bytes."""
    names, plain = schema.names, []
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"one column of each name in {path}", f"several of {', '.join(repeated)}", "Rename or remove the others.")
    for column in schema:
        kinds = {_stored(kind) for kind in _leaves(column.type)}
        if any("binary" in kind for kind in kinds):
            raise DataError(
                f"columns of texts, numbers, lists and mappings in {path}",
                f"bytes in the column {column.name!r}, from row 1 on",
                "Write the file without this column, or its values as text.",
            )
        if all(kind.startswith(_PLAIN) for kind in kinds) and not _has_map(column.type):
            plain.append(column.name)
    return frozenset(plain)


def _leaves(kind: "pa.DataType") -> "Iterator[pa.DataType]":
    """The types inside a type that have no parts."""
    if kind.num_fields == 0:
        yield kind.value_type if hasattr(kind, "value_type") else kind
    for place in range(kind.num_fields):
        yield from _leaves(kind.field(place).type)


def _stored(kind: "pa.DataType") -> str:
    """The name of a type. That of an extension is `extension<NAME>`, except where it only names its bytes."""
    storage = getattr(kind, "storage_type", kind)
    return str(kind) if "uuid" in str(kind) or "binary" not in str(storage) else str(storage)


def _has_map(kind: "pa.DataType") -> bool:
    return str(kind).startswith("map<") or any(_has_map(kind.field(place).type) for place in range(kind.num_fields))


def _values(batch: "pa.RecordBatch", path: Path, before: int) -> list[dict[str, object]]:
    """A batch's rows as Python values. When one has none, finds the row and the column. `before`: the number of earlier rows."""
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except _NO_VALUE as problem:
        for row in range(len(batch)):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[row].as_py(maps_as_pydicts="strict")
                except _NO_VALUE as error:
                    found = f"a value of type {column.type}: {error!s:.200}"
                    raise _unusable(name, f"{path} row {before + row + 1}", found) from None
        raise DataError(
            f"values that Python has in {path}, from row {before + 1} on", str(problem), "Write the file again."
        ) from problem


def _as_json(value: object, column: str, where: str) -> object:
    """The value as JSON has it: times and decimals are texts, durations are seconds, a number that is none (NaN) is null.

    Raises:
        DataError: JSON has no such value.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise _unusable(column, where, str(value))
        return None if math.isnan(value) else float(value)
    if isinstance(value, list):
        return [_as_json(each, column, where) for each in value]
    if isinstance(value, dict):
        return _mapping(value, column, where)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "tolist") and not isinstance(value, bytes):  # an array or a number of numpy
        return _as_json(value.tolist(), column, where)
    raise _unusable(column, where, f"a value of type {type(value).__name__}: {value!r:.80}")


def _mapping(value: dict[object, object], column: str, where: str) -> dict[str, object]:
    """A struct, or a map, whose keys become texts."""
    named: dict[str, object] = {}
    for key, each in value.items():
        name = key if isinstance(key, str) else str(_as_json(key, column, where))
        if name in named:
            raise _unusable(column, where, f"the key {name!r} twice")
        named[name] = _as_json(each, column, where)
    return named


def _unusable(column: str, where: str, found: str) -> DataError:
    return DataError(
        f"a text, number, list or mapping in the column {column!r} in {where}",
        found,
        "Fix the row, or write the file without this column, or its values as text.",
    )
