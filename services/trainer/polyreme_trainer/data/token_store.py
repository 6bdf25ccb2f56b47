"""Token sequences on disk. Only those in use are in memory.

Invariant: a sequence is read back as it was stored. The sequences are in unnamed temporary files (TMPDIR) that end with the
process, 5 bytes per token, and are read through a memory map; memory grows by 8 bytes per sequence.
"""

import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from polyreme.errors import DataError

Number = TypeVar("Number", bound=np.generic)


class Slices(Sequence[NDArray[Number]], Generic[Number]):
    """n arrays, stored one after the other in one array.

    Args:
        values: the values of all arrays.
        ends: int64 [n], the end of each array.
    """

    def __init__(self, values: NDArray[Number], ends: NDArray[np.int64]) -> None:
        self._values, self._ends = values, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> NDArray[Number]: ...

    @overload
    def __getitem__(self, place: slice) -> list[NDArray[Number]]: ...

    def __getitem__(self, place: int | slice) -> NDArray[Number] | list[NDArray[Number]]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        return self._values[int(self._ends[place - 1]) if place else 0 : int(self._ends[place])]


class TokenStore:
    """Sequences with their loss masks, a list that can only grow."""

    def __init__(self) -> None:
        self._ids, self._mask = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 a map keeps their content
        for file in (self._ids, self._mask):
            weakref.finalize(self, _discard, file)
        self._ends, self._tokens = array("q"), 0

    def append(self, ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> None:
        """Adds a sequence, int32 [L] and uint8 [L]. Raises DataError when the disk is full."""
        with _with_room():
            self._ids.write(np.ascontiguousarray(ids, dtype=np.int32).tobytes())
            self._mask.write(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
        self._tokens += len(ids)
        self._ends.append(self._tokens)

    def close(self) -> tuple[Slices[np.int32], Slices[np.uint8]]:
        """The ids and loss masks of all sequences. Nothing can be added any more. Raises DataError when the disk is full."""
        ends = np.array(self._ends, dtype=np.int64)
        with _with_room():
            return Slices(_mapped(self._ids, np.int32), ends), Slices(_mapped(self._mask, np.uint8), ends)


def _mapped(file: IO[bytes], kind: type[Number]) -> NDArray[Number]:
    with file:
        if file.tell() == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=kind)
        file.flush()
        return np.asarray(np.memmap(file, dtype=kind, mode="r"))


def _discard(file: IO[bytes]) -> None:
    """Closes a file. Its tokens are not needed any more, so it does not matter whether the last ones can still be written."""
    with suppress(OSError):
        file.close()


@contextmanager
def _with_room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"room for the tokens of the rows in {tempfile.gettempdir()}, the directory of temporary files",
            str(error),
            "Free disk space there, or set TMPDIR to a directory with 5 bytes per token for each learner rank.",
        ) from error
