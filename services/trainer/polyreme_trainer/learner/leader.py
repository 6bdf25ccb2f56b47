"""How the learner's ranks stay one program: every rank runs the same lines, and what only rank 0 can know, it tells the others.

Rank 0 alone talks to Redis and to replicas. While it waits there, it sends the others a token every few seconds, so that no
collective's deadline passes however long the wait; when it fails, it tells them so, and they leave instead of hanging.
"""

import asyncio
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from polyreme.errors import PolyremeError

HEARTBEAT_SECONDS = 2.0
AGENT_PID = "POLYREME_AGENT_PID"
"""In the environment of a rank that torchrun's agent started: the process that it must not outlive."""

_WAITING, _ANSWER, _FAILED = 0, 1, 2

T = TypeVar("T")
log = logging.getLogger(__name__)


class LeaderError(PolyremeError):
    """Rank 0 failed and said why; its own process reports the error."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__("rank 0 to go on", text, "See rank 0's message.")
        self.exit_code = exit_code


class Ranks:
    """The processes of one learner.

    Args:
        rank, world_size: this process and how many there are.
        device: where broadcast buffers live (the collective backend decides: cpu for gloo).
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size = rank, world_size
        self._device = device
        self._runner = asyncio.Runner() if rank == 0 else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def ask(self, question: Callable[[], Awaitable[bytes]]) -> bytes:
        """Rank 0's answer, on every rank. Every rank must call this at the same place; only rank 0 calls `question`.

        Raises:
            Whatever `question` raises, on rank 0; LeaderError with the same exit code on the others.
        """
        if self._runner is None:
            return self._listen()
        try:
            answer = self._runner.run(self._with_heartbeat(question()))
        except BaseException as error:
            self._tell_failure(error)
            raise
        self._send(_ANSWER, answer)
        return answer

    def tell(self, question: Callable[[], Awaitable[None]]) -> None:
        """Lets rank 0 do something while the others wait for it."""

        async def act() -> bytes:
            await question()
            return b""

        self.ask(act)

    def close(self) -> None:
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

    def _tell_failure(self, error: BaseException) -> None:
        code = error.exit_code if isinstance(error, PolyremeError) else 1
        try:
            self._send(_FAILED, struct.pack("<i", code) + f"{type(error).__name__}: {error}"[:2000].encode())
        except RuntimeError as lost:
            log.warning("other ranks are gone: %s", lost)

    def _send(self, kind: int, payload: bytes) -> None:
        if self.world_size == 1:
            return
        dist.broadcast(torch.tensor([kind, len(payload)], dtype=torch.int64, device=self._device), src=0)
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device), src=0)

    def _listen(self) -> bytes:
        head = torch.empty(2, dtype=torch.int64, device=self._device)
        while True:
            dist.broadcast(head, src=0)
            kind, size = (int(x) for x in head.tolist())
            payload = b""
            if size:
                buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
                dist.broadcast(buffer, src=0)
                payload = buffer.cpu().numpy().tobytes()
            if kind == _ANSWER:
                return payload
            if kind == _FAILED:
                raise LeaderError(payload[4:].decode(), struct.unpack("<i", payload[:4])[0])


def join(parts: Sequence[bytes]) -> bytes:
    """Several byte strings as one: the count, their lengths (uint64, little-endian), then the bytes."""
    return struct.pack(f"<{len(parts) + 1}Q", len(parts), *(len(part) for part in parts)) + b"".join(parts)


def split(joined: bytes) -> list[bytes]:
    """The parts given to `join`."""
    (count,) = struct.unpack_from("<Q", joined)
    offset, parts = 8 * (count + 1), []
    for size in struct.unpack_from(f"<{count}Q", joined, 8):
        parts.append(joined[offset : offset + size])
        offset += size
    return parts
