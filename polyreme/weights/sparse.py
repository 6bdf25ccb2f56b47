"""The codec of one tensor's changed elements. Pure.

Invariant: `decode(encode(...))` returns the same bits for every dtype: elements are compared and stored as unsigned integers, so
NaN payloads and minus zero are exact, and stored values are absolute, so applying a frame twice changes nothing.

A frame is one zstd frame of byte planes: the positions' words, then the values, each split into its first bytes, second bytes and
so on, because bytes of equal significance compress together. Positions are coded as gaps to the previous position, in 16-bit
words; a word of ESCAPE adds itself to the gap of the next word. A frame without positions holds all values of the tensor.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

ESCAPE = 0xFFFF
LEVEL = 1  # higher levels take several times as long for a few percent of bytes
COMPARED_BYTES = 64 << 20  # compared at once: bounds the memory of a comparison

Words = NDArray[np.unsignedinteger[Any]]
"""A tensor's elements as unsigned integers of the dtype's size, flat."""


class FrameError(ValueError):
    """A frame does not match its manifest."""


class Changes(NamedTuple):
    """Changed elements. `positions`: int64 [k], ascending flat indices, or None: every element; `values`: their new words [k]."""

    positions: NDArray[np.int64] | None
    values: Words


class Frame(NamedTuple):
    """Encoded changes. `changed`: elements; `words`: 16-bit words of positions, 0 when every element is in the frame."""

    changed: int
    words: int
    data: bytes | memoryview


def words_of(buffer: memoryview, itemsize: int) -> Words:
    """The bytes as words of `itemsize` (1, 2, 4 or 8) bytes, without a copy."""
    return np.frombuffer(buffer, np.dtype(f"<u{itemsize}"))


def find_changes(before: Words, after: Words, at_once: int = COMPARED_BYTES) -> NDArray[np.int64]:
    """Flat indices of the elements whose bits differ, ascending: int64 [k]. `at_once`: bytes that are compared at once."""
    step = at_once // after.itemsize
    found = [
        np.flatnonzero(before[start : start + step] != after[start : start + step]) + start
        for start in range(0, len(after), step)
    ]
    return np.concatenate(found).astype(np.int64, copy=False) if found else np.empty(0, np.int64)


def encode(changes: Changes) -> Frame:
    """Raises ValueError when there is nothing to encode."""
    positions, values = changes
    if not len(values):
        raise ValueError("expected at least one changed element; found none")
    words = np.empty(0, "<u2") if positions is None else _words(positions)
    planes = b"".join((*_planes(words), *_planes(values)))  # type: ignore[arg-type]  # arrays are buffers
    return Frame(len(values), len(words), zstandard.ZstdCompressor(level=LEVEL).compress(planes))


def decode(frame: Frame, itemsize: int, size: int) -> Changes:
    """The changes of a tensor of `size` elements of `itemsize` bytes.

    Raises:
        FrameError: the frame is damaged, or does not fit the tensor.
    """
    if not 0 < frame.changed <= size or (frame.words == 0 and frame.changed != size):
        raise FrameError(f"expected 1 to {size} changed elements; found {frame.changed} with {frame.words} position words")
    if frame.words > frame.changed + size // ESCAPE:
        raise FrameError(f"expected at most {frame.changed + size // ESCAPE} position words; found {frame.words}")
    expected = 2 * frame.words + itemsize * frame.changed
    try:
        found = zstandard.frame_content_size(frame.data)
        planes = zstandard.ZstdDecompressor().decompress(frame.data) if found == expected else b""
    except zstandard.ZstdError as error:
        raise FrameError(f"expected a zstd frame of {expected} bytes; found a damaged one ({error})") from None
    if len(planes) != expected:
        raise FrameError(f"expected {expected} bytes in a frame; found {found}")
    view = memoryview(planes)
    values = _joined(view[2 * frame.words :], itemsize)
    if not frame.words:
        return Changes(None, values)
    words = _joined(view[: 2 * frame.words], 2)
    positions = np.cumsum(words.astype(np.int64))[words != ESCAPE] - 1
    if len(positions) != frame.changed or positions[0] < 0 or positions[-1] >= size or np.any(np.diff(positions) <= 0):
        raise FrameError(f"expected {frame.changed} ascending positions below {size}; found {len(positions)} others")
    return Changes(positions, values)


def apply(changes: Changes, target: Words) -> None:
    """Writes the new values into the tensor's words."""
    if changes.positions is None:
        target[:] = changes.values
    else:
        target[changes.positions] = changes.values


def merge(older: Changes, newer: Changes) -> Changes:
    """One set of changes with the effect of both, one after the other."""
    if newer.positions is None:
        return newer
    if older.positions is None:
        values = older.values.copy()
        apply(newer, values)
        return Changes(None, values)
    both = np.concatenate((newer.positions, older.positions))
    positions, first = np.unique(both, return_index=True)  # the first occurrence: the newer value
    return Changes(positions, np.concatenate((newer.values, older.values))[first])


def _words(positions: NDArray[np.int64]) -> NDArray[np.uint16]:
    escapes, rests = np.divmod(np.diff(positions, prepend=-1), ESCAPE)
    ends = np.cumsum(escapes + 1)
    words = np.full(ends[-1], ESCAPE, "<u2")
    words[ends - 1] = rests
    return words


def _planes(words: Words) -> Iterator[Words]:
    """The first bytes, then the second bytes, and so on. Shifts take a fraction of the time of strided copies."""
    return ((words >> (8 * byte)).astype(np.uint8) for byte in range(words.itemsize))


def _joined(planes: memoryview, itemsize: int) -> Words:
    kind = np.dtype(f"<u{itemsize}")
    first, *rest = np.frombuffer(planes, np.uint8).reshape(itemsize, -1).astype(kind)
    for byte, plane in enumerate(rest, start=1):
        first |= plane << (8 * byte)
    return first
