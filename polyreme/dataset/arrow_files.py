"""Readers of Parquet and Arrow files.

Invariant: a row has the values that the same row would have in JSON lines. Files are mapped and read in batches, so a file may exceed the memory.
"""

import datetime
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyreme.dataset.reading import advance
from polyreme.dataset.text_files import Row
from polyreme.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 1024


def read_parquet(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file. Raises DataError."""
    yield from _rows(path, _parquet_batches(path))


def read_arrow(path: Path) -> Iterator[Row]:
    """The rows of an Arrow file, in the file format (Feather) or the stream format (Hugging Face `datasets`). Raises DataError."""
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
    number, odd = 0, None
    try:
        for batch in batches:
            odd = _odd_columns(batch.schema, path) if odd is None else odd
            for start in range(0, len(batch), _BATCH):  # a batch of an Arrow file may have any size
                for fields in batch.slice(start, _BATCH).to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", {**fields, **{name: _plain(fields[name]) for name in odd}})
    except FileNotFoundError:
        raise DataError(f"a data file at {path}", "no such file", "Fix the path in `data`.") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"a readable {path.suffix.lstrip('.')} file at {path}", f"{error!s:.200}", "Write or download the file again."
        ) from error


def _odd_columns(schema: "pa.Schema", path: Path) -> list[str]:
    """The columns with values that JSON does not have: times and decimals. Raises DataError for columns of bytes."""
    found = []
    for column in schema:
        kinds = set(_leaves(column.type))
        if any("binary" in kind for kind in kinds):
            raise DataError(
                f"columns of texts, numbers, lists and mappings in {path}",
                f"bytes in the column {column.name!r}",
                "Write the file without this column.",
            )
        if any(kind.startswith(("date", "time", "duration", "decimal")) for kind in kinds):
            found.append(column.name)
    return found


def _leaves(kind: "pa.DataType") -> Iterator[str]:
    """The names of the plain types inside a type."""
    if kind.num_fields == 0:
        yield str(kind.value_type) if hasattr(kind, "value_type") else str(kind)
    for place in range(kind.num_fields):
        yield from _leaves(kind.field(place).type)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
