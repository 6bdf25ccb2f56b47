"""One replica's way to a version: probe, stage, commit. Every call has a deadline; a failure has one of three meanings.

Kept here: a call's error is a verdict on the replica (SwapError), on the way to it (UnreachableError) or on this
learner (StaleTermError), never a bare gRPC error.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.errors import StaleTermError
from polyreme.experience.leases import Lease
from polyreme.net import rpc
from polyreme.weights.arena import Arena, ArenaError
from polyreme.weights.wire import CHUNK_BYTES, STAGE_STREAM, encode_chunk, encode_manifest, keep_memory

PROBE_SECONDS = 10.0
STAGE_SECONDS = 30.0
COMMIT_SECONDS = 60.0  # an engine step in progress ends first
SLOWEST_BYTES_PER_SECOND = 100e6  # a version's bytes widen the deadlines of staging and committing at this rate
STREAM_IDLE_SECONDS = 20.0  # without any of a stream's bytes getting away
SLOWEST_STREAM_BYTES_PER_SECOND = 2e6  # below, a stream ends although its bytes do get away

T = TypeVar("T")


class SwapError(Exception):
    """The replica answered that it could not take the version, or did not answer in time."""


class _CannotMapError(SwapError):
    pass


class UnreachableError(Exception):
    """No connection to the replica, or one that broke."""


@dataclass(frozen=True)
class Version:
    """A complete version in an arena slot."""

    manifest: pb.Manifest
    slot: int
    generation: int

    @property
    def number(self) -> int:
        return int(self.manifest.id.version)


class Link:
    """The connection to one replica's WeightsService.

    Args:
        lease: where it is.
        arena: what to offer it, and to read from for a replica on another host.
        security: of the replica's ports.
    """

    def __init__(self, lease: Lease, arena: Arena, security: SecurityConfig | None = None) -> None:
        self._security = security
        self._address, self._arena = lease.address, arena
        self._channel: grpc.aio.Channel | None = None
        self.probed = False
        """Whether the replica was asked if it can map the arena."""
        self.unmapped: str | None = None
        """Why it cannot, and gets streams instead."""

    async def probe(self, version: Version) -> None:
        """Finds out, once, whether the replica can map the arena: `unmapped`.

        Raises, as `stage`, `stream` and `commit`:
            SwapError, UnreachableError: see there. The replica serves what it served before, or nothing.
            StaleTermError: the replica knows a newer learner.
        """
        if self.probed:
            return
        identity = version.manifest.id
        request = pb.ProbeRequest(
            run_id=identity.run_id, term=identity.term, arena_path=str(self._arena.path), nonce=self._arena.nonce
        )
        answer = await self._call(lambda stub: stub.Probe(request, timeout=PROBE_SECONDS))
        self.unmapped = None if answer.can_map else answer.reason
        self.probed = True

    async def stage(self, version: Version) -> None:
        """Has the replica take the version from the arena, or finds that it cannot any more: `unmapped`."""
        request = pb.StageArenaRequest(
            manifest=version.manifest, arena_path=str(self._arena.path), slot=version.slot, generation=version.generation
        )
        try:
            await self._call(lambda stub: stub.StageArena(request, timeout=STAGE_SECONDS + mapped_seconds(version)))
        except _CannotMapError as error:
            self.unmapped = str(error)

    async def stream(self, version: Version) -> None:
        """Sends the replica the version's bytes."""
        keep_memory()
        seconds = STAGE_SECONDS + version.manifest.nbytes / SLOWEST_STREAM_BYTES_PER_SECOND
        await self._call(lambda stub: self._send(version, seconds))

    async def commit(self, version: Version) -> pb.CommitResponse:
        """Has the replica serve what it has staged."""
        identity = version.manifest.id
        committed: pb.CommitResponse = await self._call(
            lambda stub: stub.Commit(pb.CommitRequest(id=identity), timeout=COMMIT_SECONDS + mapped_seconds(version))
        )
        if committed.version != identity.version:
            raise SwapError(f"it committed version {committed.version} when asked for {identity.version}")
        return committed

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _call(self, act: Callable[[pb_grpc.WeightsServiceStub], Awaitable[T]]) -> T:
        """Runs a call; what gRPC says of it becomes one of the three meanings."""
        channel = self._channel = self._channel or rpc.connect(self._address, self._security)
        try:
            return await act(pb_grpc.WeightsServiceStub(channel))
        except grpc.aio.AioRpcError as error:
            meaning = _meaning(error)
        except UnreachableError as error:
            meaning = error
        if isinstance(meaning, UnreachableError):
            await self.close()  # a fresh channel does not inherit this one's reconnect backoff
        raise meaning

    async def _send(self, version: Version, seconds: float) -> None:
        """Raises AioRpcError, UnreachableError, SwapError."""
        assert self._channel is not None
        try:
            self._arena.check(version.slot, version.generation)
        except ArenaError as error:
            raise SwapError(str(error)) from None
        size = version.manifest.nbytes
        data = self._arena.slot_view(version.slot)[:size]
        call = self._channel.stream_stream(STAGE_STREAM, response_deserializer=pb.StageStreamResponse.FromString)(timeout=seconds)
        end, sent = _End(call), 0
        try:
            await _away(call.write(encode_manifest(version.manifest)))
            async with asyncio.timeout(STAGE_SECONDS + mapped_seconds(version)):  # it makes room first
                sent = (await call.read()).begin_at
            while sent < size:
                await _away(call.write(encode_chunk(sent, data[sent : sent + CHUNK_BYTES])))
                sent += CHUNK_BYTES
            await call.done_writing()
            await _away(call.read())
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            raise end.error or UnreachableError("the stream broke off") from None
        except TimeoutError:
            raise UnreachableError(f"the stream stood still after {sent} of {size} bytes") from None
        finally:
            call.cancel()


class _End:
    """How a call ended, in the replica's words: when a write fails for that reason, gRPC puts "internal error" in their place."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def _keep(self, call: grpc.aio.StreamStreamCall) -> None:
        code, details = _at_once(call.code()), _at_once(call.details())
        if self.error is None and code is not None:
            self.error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _at_once(answer: Coroutine[Any, Any, T]) -> T | None:
    """What a coroutine returns that need not wait."""
    try:
        answer.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    answer.close()
    return None


async def _away(act: Awaitable[T]) -> T:
    async with asyncio.timeout(STREAM_IDLE_SECONDS):
        return await act


def mapped_seconds(version: Version) -> float:
    """What reading the version's bytes from the arena may take."""
    return float(version.manifest.nbytes / SLOWEST_BYTES_PER_SECOND)


def _meaning(error: grpc.aio.AioRpcError) -> Exception:
    code, text = error.code(), f"{error.code().name}: {error.details()}"
    if code == grpc.StatusCode.ABORTED:
        return StaleTermError("this learner to hold the learner's term", text, "Another learner has taken over; this one stops.")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return UnreachableError(text)
    return (_CannotMapError if code == grpc.StatusCode.NOT_FOUND else SwapError)(text)
