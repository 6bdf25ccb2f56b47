"""Megatron's indexed data sets, as Megatron-LM and MindSpeed RL write them."""

import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polyreme.dataset.megatron_files import read_megatron
from polyreme.dataset.source import files_of, read_objects
from polyreme.errors import DataError


def write_megatron(prefix: Path, sequences: Sequence[Sequence[int]], code: int = 4, kind: str = "<i4") -> None:
    """PREFIX.bin and PREFIX.idx, laid out as by Megatron's IndexedDatasetBuilder."""
    arrays = [np.array(ids, kind) for ids in sequences]
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(each.tobytes() for each in arrays))
    lengths = np.array([len(each) for each in arrays], "<i4")
    starts = np.cumsum([0, *(each.nbytes for each in arrays)])[: len(arrays)].astype("<i8")
    documents = np.arange(len(arrays) + 1).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(arrays), len(documents))
    body = lengths.tobytes() + starts.tobytes() + documents.tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(head + body)


@pytest.mark.parametrize(("code", "kind"), [(4, "<i4"), (8, "<u2"), (5, "<i8")])
def test_sequences_of_each_type(tmp_path: Path, code: int, kind: str) -> None:
    write_megatron(tmp_path / "text_document", [[1, 2, 3], [], [65000]], code, kind)
    for suffix in (".idx", ".bin"):
        rows = list(read_objects(tmp_path / f"text_document{suffix}"))
        assert [row.fields for row in rows] == [{"input_ids": (1, 2, 3)}, {"input_ids": ()}, {"input_ids": (65000,)}]


def test_mindspeeds_files_are_found_by_their_prefix(tmp_path: Path) -> None:
    for key, sequences in {"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1]], "labels": [[7], [8, 9]]}.items():
        write_megatron(tmp_path / f"math_packed_{key}_document", sequences)
    (index, *rest) = files_of(tmp_path / "math")
    assert index.is_file() and not rest
    rows = [row.fields for row in read_objects(tmp_path / "math")]
    assert [(row["input_ids"], row["labels"]) for row in rows] == [((1, 2), (7,)), ((3,), (8, 9))]
    write_megatron(tmp_path / "math_packed_labels_document", [[7]])
    with pytest.raises(DataError, match="'labels': 1"):
        list(read_megatron(index))


def test_memory_does_not_hold_an_object_for_each_sequence(tmp_path: Path) -> None:
    count = 50_000
    write_megatron(tmp_path / "d", [[7]] * count)
    tracemalloc.start()
    try:
        assert next(iter(read_megatron(tmp_path / "d.idx"))).fields == {"input_ids": (7,)}
        assert tracemalloc.get_traced_memory()[1] < 40 * count  # bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", ["magic", "short index", "empty index", "short data", "no data"])
def test_a_damaged_data_set(tmp_path: Path, damage: str) -> None:
    write_megatron(tmp_path / "d", [[1, 2], [3]])
    index, data = tmp_path / "d.idx", tmp_path / "d.bin"
    if damage == "magic":
        index.write_bytes(b"X" + index.read_bytes()[1:])
    elif damage == "short index":
        index.write_bytes(index.read_bytes()[:40])
    elif damage == "empty index":
        index.write_bytes(b"")
    elif damage == "short data":
        data.write_bytes(data.read_bytes()[:8])
    else:
        data.unlink()
    with pytest.raises(DataError, match=r"d\.idx"):
        list(read_megatron(index))
