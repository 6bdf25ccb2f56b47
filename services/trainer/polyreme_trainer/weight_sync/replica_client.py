"""Brings one replica to a version: probe, stage, commit. Every call has a deadline.

Invariant: no call raises gRPC errors. SwapError blames the replica, UnreachableError the connection, StaleTermError this learner.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.errors import StaleTermError
from polyreme.experience.leases import Lease
from polyreme.net import rpc
from polyreme.weights.arena import Arena, ArenaError
from polyreme.weights.delta import DeltaManifest, WeightDelta
from polyreme.weights.wire import STAGE_STREAM, encode_chunk, encode_delta, encode_manifest, keep_memory
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.version import Version

T = TypeVar("T")


class SwapError(Exception):
    """The replica refused the version, or did not answer in time."""


class _CannotMapError(SwapError):
    pass


class UnreachableError(Exception):
    """The replica cannot be reached, or the connection broke."""


class RelayError(Exception):
    """The replica is in order, but could not fetch from another one.

    Attributes:
        outcome: `failed`; `missing`: the other one does not have the bytes; `full`: enough replicas fetch from it already.
    """

    def __init__(self, text: str, outcome: str) -> None:
        super().__init__(text)
        self.outcome = outcome


@dataclass(frozen=True)
class Sent:
    """A finished transfer. `nbytes`: bytes sent; `apply_seconds`: how long the replica applied and verified a delta."""

    nbytes: int
    apply_seconds: float


class ReplicaClient:
    """A client of one replica's WeightsService.

    Args:
        lease: has the replica's address.
        arena: offered to a replica on this host, and read from for a replica on another host.
        security: of the replica's ports.
        limits: None: those of a run.
    """

    def __init__(
        self, lease: Lease, arena: Arena, security: SecurityConfig | None = None, limits: PushLimits | None = None
    ) -> None:
        self._security, self._limits = security, limits or PushLimits()
        self._address, self._arena = lease.address, arena
        self._channel: grpc.aio.Channel | None = None
        self.probed = False
        """Whether the replica has answered if it can map the arena."""
        self.unmapped: str | None = None
        """Why the replica cannot map the arena, and receives streams instead; None when it can."""

    async def probe(self, version: Version) -> None:
        """Sets `unmapped`: asks once whether the replica can map the arena.

        Raises, as `stage`, `stream` and `commit`:
            SwapError, UnreachableError: the replica serves its previous version, or nothing.
            StaleTermError: the replica knows a newer learner.
        """
        if self.probed:
            return
        if version.parts:
            self.unmapped, self.probed = "the learner's machines hold parts of it", True
            return
        identity = version.manifest.id
        request = pb.ProbeRequest(
            run_id=identity.run_id, term=identity.term, arena_path=str(self._arena.path), nonce=self._arena.nonce
        )
        answer = await self._call(lambda stub: stub.Probe(request, timeout=self._limits.probe))
        self.unmapped = None if answer.can_map else answer.reason
        self.probed = True

    async def stage(self, version: Version) -> None:
        """Makes the replica stage the version from the arena. Sets `unmapped` when it no longer can."""
        request = pb.StageArenaRequest(
            manifest=version.manifest, arena_path=str(self._arena.path), slot=version.slot, generation=version.generation
        )
        seconds = self._limits.stage + self._limits.memory_seconds(version.nbytes)
        try:
            await self._call(lambda stub: stub.StageArena(request, timeout=seconds))
        except _CannotMapError as error:
            self.unmapped = str(error)

    async def stream(self, version: Version) -> Sent:
        """Sends the arena's part of the version to the replica."""
        try:
            self._arena.check(version.slot, version.generation)
        except ArenaError as error:
            raise SwapError(str(error)) from None
        data = self._arena.slot_view(version.slot)[: version.manifest.nbytes]
        return await self._stream(encode_manifest(version.manifest), data, version.manifest.nbytes)

    async def stream_delta(self, delta: WeightDelta) -> Sent:
        """Sends a delta. SwapError: also when the replica lacks its base."""
        message = encode_delta(delta.manifest.to_proto())
        return await self._stream(message, memoryview(delta.payload), delta.manifest.manifest.nbytes)

    async def relay(self, manifest: pb.Manifest, delta: DeltaManifest | None, source: str) -> Sent:
        """Makes the replica fetch a part, or the delta that leads to it, from `source`: another replica, or the part's machine.

        Raises RelayError too.
        """
        local_seconds = self._limits.stage + self._limits.memory_seconds(manifest.nbytes)
        nbytes = delta.nbytes if delta else manifest.nbytes
        request = pb.StageRelayRequest(source=source, timeout=local_seconds + nbytes / self._limits.stream_bytes_per_second)
        if delta:
            request.delta.CopyFrom(delta.to_proto())
        else:
            request.manifest.CopyFrom(manifest)
        response = await self._call(lambda stub: stub.StageRelay(request, timeout=request.timeout + local_seconds))
        outcome = response.WhichOneof("outcome") or "failed"
        if outcome != "staged":
            raise RelayError(getattr(response, outcome), outcome)
        return Sent(response.nbytes, response.staged.apply_seconds)

    async def commit(self, version: Version) -> pb.CommitResponse:
        """Makes the replica serve the staged version."""
        identity = version.manifest.id
        request = pb.CommitRequest(id=identity, canary=version.canary)
        seconds = self._limits.commit + self._limits.memory_seconds(version.nbytes)
        committed: pb.CommitResponse = await self._call(lambda stub: stub.Commit(request, timeout=seconds))
        if committed.version != identity.version:
            raise SwapError(f"expected a commit of version {identity.version}; found {committed.version}")
        return committed

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _call(self, act: Callable[[pb_grpc.WeightsServiceStub], Awaitable[T]]) -> T:
        """Runs a call and translates its gRPC error."""
        channel = self._channel = self._channel or rpc.connect(self._address, self._security)
        try:
            return await act(pb_grpc.WeightsServiceStub(channel))
        except grpc.aio.AioRpcError as error:
            translated: Exception = _translated(error)
        except UnreachableError as error:
            translated = error
        if isinstance(translated, UnreachableError):
            await self.close()  # a new channel starts without this one's reconnect backoff
        raise translated

    async def _stream(self, manifest: bytes, data: memoryview, part_nbytes: int) -> Sent:
        """Sends a manifest and its bytes; `part_nbytes`: of the whole part."""
        keep_memory()
        local_seconds = self._limits.memory_seconds(part_nbytes)
        seconds = self._limits.stage + local_seconds + len(data) / self._limits.stream_bytes_per_second
        return await self._call(lambda stub: self._send(manifest, data, local_seconds, seconds))

    async def _send(self, manifest: bytes, data: memoryview, local_seconds: float, seconds: float) -> Sent:
        """Sends a manifest and bytes; `local_seconds`: the limit to allocate or apply. Raises AioRpcError, UnreachableError."""
        assert self._channel is not None
        size, limits = len(data), self._limits
        call = self._channel.stream_stream(STAGE_STREAM, response_deserializer=pb.StageStreamResponse.FromString)(timeout=seconds)
        status, sent = _CallStatus(call), 0
        try:
            await _within(limits.stream_idle, call.write(manifest))
            async with asyncio.timeout(limits.stage + local_seconds):  # the replica allocates memory first
                sent = begin = (await call.read()).begin_at
            while sent < size:
                await _within(limits.stream_idle, call.write(encode_chunk(sent, data[sent : sent + limits.chunk_bytes])))
                sent += limits.chunk_bytes
            await call.done_writing()
            async with asyncio.timeout(limits.stream_idle + local_seconds):  # the replica applies a delta
                staged = (await call.read()).staged
            return Sent(size - begin, staged.apply_seconds)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            raise status.error or UnreachableError("the stream broke") from None
        except TimeoutError:
            raise UnreachableError(f"the stream made no progress after {sent} of {size} bytes") from None
        finally:
            call.cancel()


MakeClient = Callable[[Lease, Arena, SecurityConfig | None, PushLimits], ReplicaClient]


class _CallStatus:
    """The status that the replica ended a call with. A write that fails because of it only raises gRPC's "internal error"."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def _keep(self, call: grpc.aio.StreamStreamCall) -> None:
        code, details = _result_now(call.code()), _result_now(call.details())
        if self.error is None and code is not None:
            self.error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def _result_now(answer: Coroutine[object, object, T]) -> T | None:
    """The result of a coroutine that returns without waiting; None when it would wait."""
    try:
        answer.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    answer.close()
    return None


async def _within(seconds: float, act: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await act


def _translated(error: grpc.aio.AioRpcError) -> Exception:
    code, text = error.code(), f"{error.code().name}: {error.details()}"
    if code == grpc.StatusCode.ABORTED:
        return StaleTermError("this learner to hold the learner's term", text, "Let the learner that has taken over continue.")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return UnreachableError(text)
    return (_CannotMapError if code == grpc.StatusCode.NOT_FOUND else SwapError)(text)
