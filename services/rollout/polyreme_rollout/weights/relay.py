"""Weight transfer between replicas: `send` serves a Fetch call, and `fetch` makes one.

Invariant: every wait has a deadline. A failure of the other side is a SourceError, never a failure of this replica.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.net import rpc
from polyreme.weights.wire import (
    CHUNK_BYTES,
    FETCH,
    MAX_FETCHES,
    SLOWEST_STREAM_BYTES_PER_SECOND,
    WireError,
    decode_chunk,
    encode_chunk,
)
from polyreme_rollout.weights.outgoing import OutgoingParts, PartId
from polyreme_rollout.weights.staged_parts import Refusal, VersionId

T = TypeVar("T")


@dataclass
class TransferLimits:
    """The limits of weight transfers, read at each use. Times are in seconds.

    Attributes:
        offer: until a part is here, whose stream first allocates memory.
        resume: until a broken stream of the part continues from another source.
        connect: until the source answers.
        idle: without bytes of the source; longer than `offer` and `resume` together, so that it can report its problem.
        stream_idle: without bytes of the trainer. Keepalive detects a lost connection no earlier: see polyreme.net.rpc.
        chunk_bytes: of the messages to another replica.
        max_fetches: of a part by other replicas at once.
    """

    offer: float = 20.0
    resume: float = 10.0
    connect: float = 10.0
    idle: float = 60.0
    stream_idle: float = 30.0
    chunk_bytes: int = CHUNK_BYTES
    max_fetches: int = MAX_FETCHES


class SourceError(Exception):
    """The other replica did not send the bytes. `outcome`: the value for the StageRelayResponse."""

    def __init__(self, text: str, outcome: Literal["failed", "missing", "full"] = "failed") -> None:
        super().__init__(text)
        self.outcome = outcome


async def send(
    parts: OutgoingParts, request: pb.FetchRequest, write: Callable[[bytes], Awaitable[None]], limits: TransferLimits
) -> None:
    """Sends a part's bytes from the request's offset on. Raises Refusal: NOT_FOUND, UNAVAILABLE."""
    outgoing = await parts.get(_part_id(request), limits.offer)
    position = request.offset
    if outgoing is None:
        raise Refusal("NOT_FOUND", f"expected part {request.part} of version {request.id.version} here; found none")
    while position < outgoing.nbytes:
        try:
            data = await outgoing.read(position, limits.chunk_bytes, limits.resume)
        except TimeoutError:
            raise Refusal("UNAVAILABLE", f"expected more than {position} bytes of the part; its stream has ended") from None
        if not data:
            raise Refusal("NOT_FOUND", f"other bytes have replaced part {request.part} of version {request.id.version}")
        message = encode_chunk(position, data)
        position += len(data)
        await write(message)


async def fetch(
    source: str, request: pb.FetchRequest, security: SecurityConfig | None, seconds: float, largest: int, limits: TransferLimits
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """Yields a part's bytes in order, from the request's offset on.

    Args:
        seconds: timeout of the whole transfer.
        largest: bytes of the largest tensor or frame, which a still receiving source verifies completely before it sends any.

    Raises:
        SourceError: also when the source sends nothing for too long.
    """
    idle_seconds = limits.idle + largest / SLOWEST_STREAM_BYTES_PER_SECOND
    async with rpc.connect(source, security) as channel:
        fetching = channel.unary_stream(FETCH, request_serializer=pb.FetchRequest.SerializeToString)(request, timeout=seconds)
        try:
            await _within(limits.connect, fetching.initial_metadata(), f"{source}: no answer")
            while (message := await _within(idle_seconds, fetching.read(), f"{source}: no bytes")) is not grpc.aio.EOF:
                yield decode_chunk(message)
        except grpc.aio.AioRpcError as error:
            text = f"{source}: {error.code().name}: {error.details()}"
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise SourceError(text, "missing") from None
            raise SourceError(text, "full" if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED else "failed") from None
        except WireError as error:
            raise SourceError(f"{source}: {error}") from None
        finally:
            fetching.cancel()


async def _within(seconds: float, act: Awaitable[T], failure: str) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await act
    except TimeoutError:
        raise SourceError(f"{failure} within {seconds:.0f} s") from None


def _part_id(request: pb.FetchRequest) -> PartId:
    base = VersionId(request.base.term, request.base.version) if request.HasField("base") else None
    return PartId(VersionId(request.id.term, request.id.version), request.part, base)
