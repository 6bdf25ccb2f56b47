"""Reader of Megatron's indexed data sets: `NAME.idx` has the position of each sequence in `NAME.bin`.

The files `PREFIX_packed_KEY_document.{idx,bin}` of MindSpeed RL form one data set, whose rows have a sequence for every key.

Format: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.

Invariant: a row is token ids, and every sequence lies inside its file. Files are mapped, not read, so they may exceed the memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyreme.dataset.columns import TokenIds
from polyreme.dataset.reading import advance
from polyreme.dataset.text_files import Row
from polyreme.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = len(_MAGIC) + 8 + 1 + 8 + 8
_INTEGERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Type codes of integers, the only ones in a data set of token ids."""
_PACKED = re.compile(r"(?P<prefix>.+)_packed_(?P<key>\w+)_document\.idx")


def packed_files(prefix: Path) -> list[Path]:
    """The index files of MindSpeed RL's `data_path`, which is a prefix; empty when there are none."""
    return sorted(prefix.parent.glob(f"{prefix.name}_packed_*_document.idx"))


def read_megatron(path: Path) -> Iterator[Row]:
    """The rows of an index file and of the files that belong to it. A single file has the column `input_ids`.

    Raises:
        DataError: a file is damaged, or the files have different numbers of sequences.
    """
    path = path.with_suffix(".idx")
    match = _PACKED.fullmatch(path.name)
    files = packed_files(path.with_name(match["prefix"])) if match else [path]
    columns = {_key(file): _sequences(file) for file in files}
    counts = {key: len(sequences) for key, sequences in columns.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"as many sequences in every file of {path}", str(counts), "Convert the data again.")
    for number, row in enumerate(zip(*columns.values(), strict=True), 1):
        advance(row[0].nbytes)
        yield Row(f"{path} row {number}", {key: TokenIds(ids.tolist()) for key, ids in zip(columns, row, strict=True)})


def _key(file: Path) -> str:
    match = _PACKED.fullmatch(file.name)
    return match["key"] if match else "input_ids"


@dataclass(frozen=True)
class _Sequences:
    """The sequences of one file: the first token and the number of tokens of each, int64 and int32 [sequences]."""

    ids: "NDArray[np.integer]"
    firsts: "NDArray[np.int64]"
    lengths: "NDArray[np.int32]"

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> "Iterator[NDArray[np.integer]]":
        for first, length in zip(self.firsts, self.lengths, strict=True):
            yield self.ids[first : first + length]


def _sequences(index: Path) -> _Sequences:
    data = index.with_suffix(".bin")
    try:
        size = data.stat().st_size
        head = np.memmap(index, np.uint8, "r") if index.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise DataError(f"the files {index.name} and {data.name}", str(error), "Fix the path in `data`.") from error
    first = head[:_HEADER].tobytes()
    if first[: len(_MAGIC)] != _MAGIC or len(first) < _HEADER or first[17] not in _INTEGERS:
        raise DataError(f"Megatron's index of integers in {index}", "another content", "Convert the data again.")
    kind = np.dtype(_INTEGERS[first[17]])
    count = int.from_bytes(first[18:26], "little")
    if len(head) < _HEADER + 12 * count:
        raise DataError(f"{count} sequences in {index}", "a shorter file", "Convert the data again.")
    lengths = np.frombuffer(head, "<i4", count, _HEADER)
    starts = np.frombuffer(head, "<i8", count, _HEADER + 4 * count)
    if count and (lengths.min() < 0 or starts.min() < 0 or int((starts + lengths.astype("<i8") * kind.itemsize).max()) > size):
        raise DataError(f"every sequence of {index.name} inside {data}", f"{size} bytes", "Convert the data again.")
    ids = np.memmap(data, kind, "r").view(np.ndarray) if size else np.empty(0, kind)
    return _Sequences(ids, starts // kind.itemsize, lengths)
