"""Bytes that arrive in order in one buffer. A thread hashes them, and other replicas may fetch the verified ones.

Invariant: one thread at a time writes to the buffer.
"""

import asyncio

from polyreme.weights.assembly import RangeAssembly
from polyreme_rollout.weights.outgoing import Outgoing


class Arrival:
    """The progress of one buffer."""

    def __init__(self, assembly: RangeAssembly, data: memoryview) -> None:
        self.assembly = assembly
        self.outgoing = Outgoing(data[: assembly.nbytes], assembly.verified)
        self._adding: asyncio.Future[object] | None = None

    @property
    def position(self) -> int:
        """The offset of the next byte, while nothing is being added."""
        return self.assembly.position

    async def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes, once the previous bytes are hashed. Raises RangeError, DigestError, also for previous bytes."""
        await self.added()
        self._adding = asyncio.get_running_loop().run_in_executor(None, self.assembly.add, offset, data)
        self._adding.add_done_callback(self._publish)

    async def added(self) -> None:
        """Waits until all bytes are hashed. Raises as `add`."""
        if self._adding:
            await asyncio.shield(self._adding)

    async def idle(self) -> None:
        """Waits until no thread writes to the buffer. Ignores an error of that thread, which belongs to an older stream."""
        if self._adding:
            await asyncio.wait({self._adding})
        self._adding = None

    def begin(self) -> None:
        """Records that a stream has started."""
        self.outgoing.update(self.assembly.verified, arriving=True)

    def end(self) -> None:
        """Records that the stream has ended."""
        self.outgoing.update(self.outgoing.available, arriving=False)

    def _publish(self, added: "asyncio.Future[object]") -> None:
        if not added.cancelled() and not added.exception():  # the stream may end before it reads the error
            self.outgoing.update(self.assembly.verified, self.outgoing.arriving)
