"""Keeps the learner's ranks in step: every rank runs the same code, and rank 0 broadcasts the data that only it has.

Invariant: no collective times out while rank 0 waits, because rank 0 sends a heartbeat every few seconds. When rank 0 fails,
every other rank raises LeaderError instead of waiting. Only rank 0 communicates with Redis and replicas. This module imports no
torch: the engine provides the channel between the ranks.
"""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from polyreme.errors import PolyremeError
from polyreme.process.tasks import running

HEARTBEAT_SECONDS = 2.0
AGENT_PID = "POLYREME_AGENT_PID"
"""Environment variable of a rank that torchrun's agent started: the pid of the agent, with which the rank dies."""

_WAITING, _ANSWER, _FAILED = 0, 1, 2

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LeaderError(PolyremeError):
    """Rank 0 failed and reported why; its own process reports the error."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__("rank 0 to keep running", text, "See rank 0's message.")
        self.exit_code = exit_code


class Channel(Protocol):
    """Messages from rank 0 to all other ranks, in order."""

    def send(self, kind: int, payload: bytes) -> None:
        """Called on rank 0. Raises RuntimeError when another rank has died."""

    def receive(self) -> tuple[int, bytes]:
        """Called on every other rank. Raises RuntimeError when rank 0 has died or sends nothing for too long."""


class Ranks:
    """The processes of one learner.

    Args:
        rank: this process's number.
        channel: connects the ranks; None when there is one rank.
    """

    def __init__(self, rank: int = 0, channel: Channel | None = None) -> None:
        self.rank = rank
        self._channel = channel
        self._runner = asyncio.Runner() if rank == 0 else None

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return self._channel is None

    def broadcast_from_leader(self, question: Callable[[], Awaitable[bytes]]) -> bytes:
        """Rank 0's answer, on every rank. Collective: every rank must call it; only rank 0 calls `question`.

        Raises:
            On rank 0, the error of `question`; on the others, LeaderError with the same exit code.
        """
        if self._runner is None:
            return self.hear()
        try:
            answer = self._runner.run(self._with_heartbeat(question()))
        except BaseException as error:
            self._send_failure(error)
            raise
        self._send(_ANSWER, answer)
        return answer

    def agree(self, question: Callable[[], bool]) -> bool:
        """Rank 0's answer to a question that takes no time, on every rank. Raises as `broadcast_from_leader`."""

        async def answer() -> bytes:
            return bytes([question()])

        return self.broadcast_from_leader(answer) == b"\x01"

    def on_leader(self, action: Callable[[], Awaitable[None]]) -> None:
        """Runs `action` on rank 0 while the others wait for it. Raises as `broadcast_from_leader`."""

        async def act() -> bytes:
            await action()
            return b""

        self.broadcast_from_leader(act)

    def tell(self, message: bytes) -> None:
        """Sends a message from rank 0 to all others, which call `hear`. Raises RuntimeError when another rank has died."""
        self._send(_ANSWER, message)

    def hear(self) -> bytes:
        """What rank 0 tells, on another rank. Raises LeaderError when rank 0 has failed, and RuntimeError when it has died."""
        assert self._channel is not None, "a rank other than 0 has a channel"
        while True:
            kind, payload = self._channel.receive()
            if kind == _ANSWER:
                return payload
            if kind == _FAILED:
                raise LeaderError(payload[4:].decode(), struct.unpack("<i", payload[:4])[0])

    @asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """On rank 0, a block that calls `tell`, in the thread of its event loop. The others get heartbeats between the calls, and
        hear of the block's error. When another rank has died, the next `tell` raises RuntimeError."""
        async with running(self._beat()):
            try:
                yield
            except BaseException as error:
                self._send_failure(error)
                raise

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._send(_WAITING, b"")

    def close(self) -> None:
        """Closes rank 0's event loop."""
        if self._runner is not None:
            self._runner.close()

    async def _with_heartbeat(self, question: Awaitable[T]) -> T:
        task = asyncio.ensure_future(question)
        try:
            while not (await asyncio.wait({task}, timeout=HEARTBEAT_SECONDS))[0]:
                self._send(_WAITING, b"")
            return task.result()
        finally:
            task.cancel()

    def _send_failure(self, error: BaseException) -> None:
        is_asked = isinstance(error, asyncio.CancelledError)
        code = error.exit_code if isinstance(error, PolyremeError) else int(not is_asked)
        try:
            self._send(_FAILED, struct.pack("<i", code) + f"{type(error).__name__}: {error}"[:2000].encode())
        except RuntimeError as lost:
            logger.warning("cannot report the failure to the other ranks: %s", lost)

    def _send(self, kind: int, payload: bytes) -> None:
        if self._channel is not None:
            self._channel.send(kind, payload)


def join(parts: Sequence[bytes]) -> bytes:
    """Joins byte strings: their count, their lengths (uint64, little-endian), then the bytes."""
    return struct.pack(f"<{len(parts) + 1}Q", len(parts), *(len(part) for part in parts)) + b"".join(parts)


def split(joined: bytes) -> list[bytes]:
    """The parts given to `join`."""
    (count,) = struct.unpack_from("<Q", joined)
    offset, parts = 8 * (count + 1), []
    for size in struct.unpack_from(f"<{count}Q", joined, 8):
        parts.append(joined[offset : offset + size])
        offset += size
    return parts
