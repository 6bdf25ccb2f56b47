"""Weight transfer between replicas: `send` serves a Fetch call, and `fetch` makes one.

Invariant: every wait has a deadline. A failure of the other side is a SourceError, never a failure of this replica.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, TypeVar

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.net import rpc
from polyreme.weights.wire import CHUNK_BYTES, FETCH, SLOWEST_STREAM_BYTES_PER_SECOND, WireError, decode_chunk, encode_chunk
from polyreme_rollout.weights.outgoing import OutgoingParts, PartId
from polyreme_rollout.weights.staged_parts import Refusal, VersionId

OFFER_TIMEOUT = 20.0  # the part's stream first allocates memory
RESUME_TIMEOUT = 10.0  # a broken stream of the part continues from another source
CONNECT_TIMEOUT = 10.0
IDLE_TIMEOUT = 60.0  # longer than OFFER_TIMEOUT and RESUME_TIMEOUT together, so that the source can report its problem

T = TypeVar("T")


class SourceError(Exception):
    """The other replica did not send the bytes. `outcome`: the value for the StageRelayResponse."""

    def __init__(self, text: str, outcome: Literal["failed", "missing", "full"] = "failed") -> None:
        super().__init__(text)
        self.outcome = outcome


async def send(parts: OutgoingParts, request: pb.FetchRequest, write: Callable[[bytes], Awaitable[None]]) -> None:
    """Sends a part's bytes from the request's offset on. Raises Refusal: NOT_FOUND, UNAVAILABLE."""
    outgoing = await parts.get(_part_id(request), OFFER_TIMEOUT)
    position = request.offset
    if outgoing is None:
        raise Refusal("NOT_FOUND", f"expected part {request.part} of version {request.id.version} here; found none")
    while position < outgoing.nbytes:
        try:
            data = await outgoing.read(position, CHUNK_BYTES, RESUME_TIMEOUT)
        except TimeoutError:
            raise Refusal("UNAVAILABLE", f"expected more than {position} bytes of the part; its stream has ended") from None
        if not data:
            raise Refusal("NOT_FOUND", f"other bytes have replaced part {request.part} of version {request.id.version}")
        message = encode_chunk(position, data)
        position += len(data)
        await write(message)


async def fetch(
    source: str, request: pb.FetchRequest, security: SecurityConfig | None, seconds: float, largest: int
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """Yields a part's bytes in order, from the request's offset on.

    Args:
        seconds: timeout of the whole transfer.
        largest: bytes of the largest tensor or frame, which a source that is still receiving verifies completely before it sends any of it.

    Raises:
        SourceError: also when the source sends nothing for too long.
    """
    idle_seconds = IDLE_TIMEOUT + largest / SLOWEST_STREAM_BYTES_PER_SECOND
    async with rpc.connect(source, security) as channel:
        fetching = channel.unary_stream(FETCH, request_serializer=pb.FetchRequest.SerializeToString)(request, timeout=seconds)
        try:
            await _within(CONNECT_TIMEOUT, fetching.initial_metadata(), f"{source}: no answer")
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
