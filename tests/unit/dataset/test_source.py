"""Every format gives the same rows, and a source selects its part of them."""

import csv
import datetime
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from polyreme.config.data import DataSource
from polyreme.dataset.columns import column_names, value_at
from polyreme.dataset.source import digest_of, files_of, read_objects
from polyreme.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"style": "rule", "ground_truth": "2"}, "level": 3},
    {"prompt": [{"role": "user", "content": "2+\u20282="}], "reward_model": {"style": "rule", "ground_truth": "4"}, "level": 1},
]
TABLE = pa.Table.from_pylist(ROWS)


def write_stream(path: Path, table: pa.Table = TABLE) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def write_saved(folder: Path) -> None:
    """Writes a directory like `save_to_disk` of Hugging Face `datasets`."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for place, name in enumerate(names):
        write_stream(folder / name, TABLE.slice(place, 1))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for place in range(2):
        parquet.write_table(TABLE.slice(place, 1), folder / f"train-{place:05d}-of-00002.parquet")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": lambda path: path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)),
    "rows.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "lines.json": lambda path: path.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n"),
    "rows.parquet": lambda path: parquet.write_table(TABLE, path),
    "rows.feather": lambda path: feather.write_feather(TABLE, path),
    "stream.arrow": write_stream,
    "saved": write_saved,
    "shards": write_shards,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    rows = list(read_objects(tmp_path / name))
    assert [row.fields for row in rows] == ROWS
    assert all(row.where.startswith(str(tmp_path / name)) and row.where[-1] in "123" for row in rows)


@pytest.mark.parametrize(("name", "mark"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_values_separated_by_commas_or_tabs_are_texts(tmp_path: Path, name: str, mark: str) -> None:
    with open(tmp_path / name, "w", newline="") as file:
        csv.writer(file, delimiter=mark).writerows([["prompt", "answer"], ['a "b"\nc', "4"], ["", "5"]])
    assert [row.fields for row in read_objects(tmp_path / name)] == [
        {"prompt": 'a "b"\nc', "answer": "4"},
        {"prompt": "", "answer": "5"},
    ]


def test_a_long_cell(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    assert [len(row.fields["prompt"]) for row in read_objects(tmp_path / "rows.csv")] == [200_000]


def test_times_and_decimals_become_what_json_has(tmp_path: Path) -> None:
    row = {"at": datetime.datetime(2026, 1, 2, 3), "price": [Decimal("1.50")], "day": {"of": datetime.date(2026, 1, 2)}}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (read,) = read_objects(tmp_path / "rows.parquet")
    assert read.fields == {"at": "2026-01-02T03:00:00", "price": ["1.50"], "day": {"of": "2026-01-02"}}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("rows.csv", "a,b\n1\n", r"rows.csv:2; found 1\."),
        ("rows.csv", 'a\n"1', r"CSV in .*rows.csv:2"),
        ("rows.csv", "a,b,a\n1,2,3\n", r"rows.csv:1; found several of 'a'"),
        ("rows.csv", b"a\n\xff\n", r"UTF-8 text in .*rows.csv:2"),
        ("rows.json", '[{"a": 1}, 2]', r"rows.json element 2 in line 1; found int"),
        ("rows.json", '[{"a": 1},\n 2', r"rows.json element 2 in line 2; found int"),
        ("rows.json", '[{"a": 1}\n {"a": 2}]', r"end of the JSON array after .*element 1"),
        ("rows.json", '[{"a": 1}', r"element 1 in line 1; found the end of the file"),
        ("rows.json", '[{"a": 1},\n]', r"rows.json element 2 in line 2; found Expecting value at column 1"),
        ("rows.json", '[{"a": 1}] {"a": 2}', "end of .* after its JSON array"),
        ("rows.json", '[{"a": 1},\n\n{"a": Infinity}]', r"element 2 in line 3; found Infinity"),
        ("rows.json", "[]", "at least one row"),
        ("rows.parquet", "PAR1", "readable parquet file"),
        ("rows.arrow", "ARROW1 and more", "readable arrow file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str | bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=complaint):
        list(read_objects(tmp_path / name))


def test_bytes_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist([{"images": [{"bytes": b"x"}]}]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="'images'"):
        list(read_objects(tmp_path / "rows.parquet"))


def test_a_directory_of_several_splits_needs_a_choice(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}-00000-of-00001.jsonl").write_text(json.dumps({"split": split}))
    with pytest.raises(DataError, match=r"test\.jsonl, train\.jsonl"):
        files_of(tmp_path)
    assert [row.fields["split"] for row in read_objects(tmp_path / "train-*.jsonl")] == ["train"]
    with pytest.raises(DataError, match="data files"):
        files_of(tmp_path / "dev-*")
    (tmp_path / "both" / "train").mkdir(parents=True)
    (tmp_path / "both" / "train" / "state.json").write_text("{}")
    (tmp_path / "both" / "dataset_dict.json").write_text("{}")
    with pytest.raises(DataError, match="the splits train"):
        files_of(tmp_path / "both")
    with pytest.raises(DataError, match=r"state\.json"):
        files_of(tmp_path / "both" / "train")


def test_brackets_in_a_path_are_no_pattern(tmp_path: Path) -> None:
    for name in ("set 1", "set [1]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train-0.jsonl").write_text(json.dumps({"name": name}))
    assert [row.fields["name"] for row in read_objects(tmp_path / "set [1]" / "train-*.jsonl")] == ["set [1]"]


def test_splits_share_no_row_and_leave_none_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": number % 150}) + "\n" for number in range(300)))

    def numbers(split: tuple[float, float]) -> list[int]:
        return [row.fields["n"] for row in read_objects((DataSource(path=path, split=split),))]

    most, rest = numbers((0, 0.8)), numbers((0.8, 1))
    assert sorted(most + rest) == sorted(number % 150 for number in range(300))
    assert not set(most) & set(rest)  # equal rows stay together
    assert 200 < len(most) < 280
    assert numbers((0, 0.4)) + numbers((0.4, 0.8)) != most and sorted(numbers((0, 0.4)) + numbers((0.4, 0.8))) == sorted(most)


def test_a_split_by_a_column_keeps_equal_prompts_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": {"text": number % 40}, "index": number}) + "\n" for number in range(200)))
    parts = [
        {row.fields["q"]["text"] for row in read_objects((DataSource(path=path, split=split, split_by="q.text"),))}
        for split in ((0, 0.7), (0.7, 1))
    ]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(range(40))
    with pytest.raises(DataError, match=r"'missing'.*split_by"):
        list(read_objects((DataSource(path=path, split=(0, 1), split_by="missing"),)))


def test_a_source_adds_columns(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    renamed = DataSource(path=tmp_path / "rows.jsonl", rename={"answer": "reward_model.ground_truth"}, add={"kind": "math"})
    (row,) = read_objects((renamed,))
    assert row.fields == {**ROWS[0], "answer": "2", "kind": "math"}
    with pytest.raises(DataError, match=r"'nothing\.here'.*rows.jsonl:1"):
        list(read_objects((DataSource(path=renamed.path, rename={"answer": "nothing.here"}),)))


def test_a_digest_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    seen = {digest_of(path, block=4)}
    for content in (
        b"",
        b"a",
        b"ab",
        b"x" * 256,
        b"x" * 255 + b"y",
        b"y" + b"x" * 255,
        b"x" * 1000,
        b"x" * 999 + b"y",
        b"x" * 1001,
    ):
        path.write_bytes(content)
        assert digest_of(path, block=4) == digest_of((DataSource(path=path, add={"a": 1}),), block=4) not in seen
        seen.add(digest_of(path, block=4))
    assert "" in seen and len(seen) == 10


def test_rows_are_read_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch of a Parquet file is read only when its first row is requested."""
    table = pa.Table.from_pylist([{"n": number} for number in range(3000)])
    parquet.write_table(table, tmp_path / "rows.parquet")
    read: list[int] = []
    original = parquet.ParquetFile.iter_batches

    def counted(self: Any, **options: Any) -> Iterator[Any]:
        for batch in original(self, **options):
            read.append(len(batch))
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    rows = read_objects(tmp_path / "rows.parquet")
    assert next(rows).fields == {"n": 0} and len(read) == 1
    assert [row.fields["n"] for row in rows] == list(range(1, 3000)) and sum(read) == 3000


@pytest.mark.parametrize(
    ("key", "value"), [("a.b", 1), ("a.c", 2), ("d.0.e", 3), ("d.1.e", None), ("d.x", None), ("missing", None), ("a.c.f", None)]
)
def test_dotted_paths(key: str, value: Any) -> None:
    assert value_at({"a.b": 1, "a": {"b": 0, "c": 2}, "d": [{"e": 3}]}, key) == value


def test_columns_inside_a_column_are_named_by_their_path() -> None:
    assert column_names({"b": [{"x": 1}], "a": {"d": {"e": 1}, "c": {}}}) == ["a.c", "a.d.e", "b"]


def test_a_missing_file_of_a_table_is_not_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        list(read_objects(tmp_path / "none.parquet"))
    assert error.value.found == "no such file"


def test_a_large_row_group_is_not_read_at_once(tmp_path: Path) -> None:
    table = pa.table({"prompt": [f"{number:06d}" * 50 for number in range(40_000)]})  # 12 MB
    parquet.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False, row_group_size=len(table))
    size = table.nbytes
    del table
    before = pa.total_allocated_bytes()
    rows = read_objects(tmp_path / "a.parquet")
    assert next(rows).fields == {"prompt": "000000" * 50}
    assert pa.total_allocated_bytes() - before < size / 2
    assert sum(1 for _ in rows) == 39_999


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>What is the area?", "images": ["triangle.png"]},
        {"prompt": [{"role": "user", "content": "Say what this is: <|video_pad|>"}], "video": "a.mp4"},
        {"question": "<audio> Who speaks?", "audio_urls": ["u"]},
    ],
)
def test_a_text_with_a_place_for_a_picture_is_refused(row: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+3"}\n' + json.dumps(row))
    with pytest.raises(DataError, match=r"text only in .*rows.jsonl:2; found <.*in a text, and a column"):
        list(read_objects(path))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Write an <image> tag.", "images": []},
        {"prompt": "Write an <image> tag.", "answer": "<image>"},
        {"prompt": "What is 2+3?", "image": "cover.png"},
    ],
)
def test_a_text_that_stands_without_a_picture_is_read(row: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert [fields for _, fields in read_objects(tmp_path / "rows.jsonl")] == [row]
