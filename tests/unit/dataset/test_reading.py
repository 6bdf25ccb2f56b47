"""The progress that readers report."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from polyreme.dataset.reading import watched
from polyreme.dataset.source import bytes_of, read_objects

ROWS = [{"prompt": f"é {number}", "answer": str(number)} for number in range(3000)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.feather"])
def test_the_bytes_of_a_file_are_counted_while_its_rows_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
        case ".json":
            path.write_text("[" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "]")
        case ".csv":
            path.write_text("prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS))
        case ".parquet":
            parquet.write_table(pa.Table.from_pylist(ROWS), path)
        case ".feather":
            feather.write_feather(pa.Table.from_pylist(ROWS), path, compression="uncompressed")
    counted: list[int] = []
    with watched(counted.append):
        assert [fields for _, fields in read_objects(path)] == ROWS
    assert sum(counted) == pytest.approx(bytes_of(path), rel=0.1)
    seen = len(counted)
    list(read_objects(path))
    assert len(counted) == seen, "only within the block"
