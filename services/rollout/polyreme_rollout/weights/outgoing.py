"""Verified bytes that other replicas may fetch, even while more arrive. Runs on one event loop.

Invariant: a reader gets only verified bytes, and none after `close`, because the memory may then be overwritten.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from polyreme_rollout.weights.staged_parts import VersionId


@dataclass(frozen=True)
class PartId:
    """A part of a version or, with `base`, the payload of the delta from that version."""

    version: VersionId
    part: int
    base: VersionId | None = None


class Outgoing:
    """The bytes of one buffer.

    Attributes:
        available: number of bytes, from the first one on, that may be read.
        arriving: whether a stream is adding bytes.
        closed: whether the memory has been released.
    """

    def __init__(self, data: memoryview, available: int = 0) -> None:
        self._data = data
        self.nbytes, self.available = len(data), available
        self.arriving = self.closed = False
        self._changed = asyncio.Event()

    def update(self, available: int, arriving: bool) -> None:
        self.available, self.arriving = available, arriving
        self._notify()

    def close(self) -> None:
        """Releases the memory."""
        self.closed, self._data = True, memoryview(b"")
        self._notify()

    async def read(self, offset: int, size: int, timeout: float) -> memoryview:  # noqa: ASYNC109
        """Returns 1 to `size` bytes from `offset` on, or none once closed. The caller copies them before its next await.

        Raises:
            TimeoutError: no more bytes arrived for `timeout` seconds.
        """
        while not self.closed and self.available <= offset:
            changed = self._changed
            async with asyncio.timeout(None if self.arriving else timeout):
                await changed.wait()
        return self._data[offset : min(offset + size, self.available)]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class OutgoingParts:
    """The parts that a replica can send to others."""

    def __init__(self) -> None:
        self._parts: dict[PartId, Outgoing] = {}
        self._changed = asyncio.Event()

    def offer(self, id: PartId, outgoing: Outgoing) -> None:
        self._parts = {known: part for known, part in self._parts.items() if not part.closed}
        self._parts[id] = outgoing
        self._changed.set()
        self._changed = asyncio.Event()

    async def get(self, id: PartId, timeout: float) -> Outgoing | None:  # noqa: ASYNC109
        """Returns the part, and waits up to `timeout` seconds for it. None: it was not offered in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while (found := self._parts.get(id)) is None:
                    await self._changed.wait()
                return found
        return None
