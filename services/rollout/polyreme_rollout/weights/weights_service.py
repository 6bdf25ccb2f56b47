"""The gRPC side of weight swaps.

Invariant: every refusal of the weight swapper becomes a gRPC status with its message. A stream that sends nothing for too long
ends with a status.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NoReturn, TypeVar

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.weights.canary import Canary
from polyreme.weights.delta import DeltaManifest
from polyreme.weights.manifest import Manifest, ManifestError
from polyreme.weights.wire import WireError, decode_chunk, decode_manifest
from polyreme_rollout.engine.protocol import EngineDeadError
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.weights.relay import SourceError, TransferLimits, fetch, send
from polyreme_rollout.weights.staged_parts import Refusal, VersionId
from polyreme_rollout.weights.weight_swap import WeightSwapper

M = TypeVar("M")
T = TypeVar("T")


class WeightsService(pb_grpc.WeightsServiceServicer):
    """Args: swapper, which is also an attribute; metrics; on_change: called after every commit, successful or failed; security:
    of the other replicas' ports; limits: None: those of a run."""

    def __init__(
        self,
        swapper: WeightSwapper,
        metrics: ReplicaMetrics,
        on_change: Callable[[], Awaitable[None]],
        security: SecurityConfig | None = None,
        limits: TransferLimits | None = None,
    ) -> None:
        self.limits = limits or TransferLimits()
        self.swapper, self._metrics, self._on_change, self._security = swapper, metrics, on_change, security
        self._fetches = Counter[int]()  # by part

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the calls. The messages with bytes are not decoded, or encoded: see polyreme.weights.wire."""
        pb_grpc.add_WeightsServiceServicer_to_server(self, server)
        undecoded = grpc.stream_stream_rpc_method_handler(
            self.StageStream, response_serializer=pb.StageStreamResponse.SerializeToString
        )
        name = pb.DESCRIPTOR.services_by_name["WeightsService"].full_name
        unencoded = grpc.unary_stream_rpc_method_handler(self.Fetch, request_deserializer=pb.FetchRequest.FromString)
        server.add_registered_method_handlers(name, {"StageStream": undecoded, "Fetch": unencoded})

    async def Probe(self, request: pb.ProbeRequest, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        async with _statuses(context):
            try:
                self.swapper.staging.probe(request.run_id, request.term, request.arena_path, request.nonce)
            except Refusal as refusal:
                if refusal.code != "NOT_FOUND":
                    raise
                return pb.ProbeResponse(can_map=False, reason=str(refusal))
            return pb.ProbeResponse(can_map=True)

    async def StageArena(self, request: pb.StageArenaRequest, context: grpc.aio.ServicerContext) -> pb.StageResponse:
        async with _statuses(context):
            manifest = _parsed(Manifest.from_proto, request.manifest)
            seconds = await self.swapper.staging.stage(manifest, request.arena_path, request.slot, request.generation)
            return pb.StageResponse(verify_seconds=seconds)

    async def StageStream(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with _statuses(context):
            try:
                content = _content(decode_manifest(await self._next(messages) or b""))
                async with self.swapper.staging.receive(content) as incoming:
                    await context.write(pb.StageStreamResponse(begin_at=incoming.position))
                    while (message := await self._next(messages)) is not None:
                        offset, data = decode_chunk(message)
                        self._metrics.received_bytes.labels("trainer").inc(len(data))
                        await incoming.add(offset, data)
                    ended = time.perf_counter()
                seconds = time.perf_counter() - ended
                staged = pb.StageResponse(verify_seconds=seconds, apply_seconds=incoming.apply_seconds)
                await context.write(pb.StageStreamResponse(staged=staged))
            except WireError as error:
                raise Refusal("INVALID_ARGUMENT", str(error)) from None

    async def StageRelay(self, request: pb.StageRelayRequest, context: grpc.aio.ServicerContext) -> pb.StageRelayResponse:
        async with _statuses(context):
            received = self._metrics.received_bytes.labels("replica")
            response, ended = pb.StageRelayResponse(), time.perf_counter()
            try:
                content = _content(request.delta if request.HasField("delta") else request.manifest)
                async with self.swapper.staging.receive(content) as incoming:
                    if incoming.position < incoming.nbytes:
                        wanted = _fetch_request(request, incoming.position)
                        fetching = fetch(request.source, wanted, self._security, request.timeout, _largest(content), self.limits)
                        async with aclosing(fetching) as chunks:
                            async for offset, data in chunks:
                                received.inc(len(data))
                                response.nbytes += len(data)
                                await incoming.add(offset, data)
                    ended = time.perf_counter()
                response.staged.verify_seconds = time.perf_counter() - ended
                response.staged.apply_seconds = incoming.apply_seconds
            except SourceError as error:
                setattr(response, error.outcome, str(error))
            except Refusal as refusal:
                if refusal.code not in ("DATA_LOSS", "INVALID_ARGUMENT"):
                    raise
                response.failed = f"{request.source}: {refusal.code}: {refusal}"
            return response

    async def Fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        async with _statuses(context):
            self.swapper.staging.check(request.id.run_id, request.id.term)
            if self._fetches[request.part] >= self.limits.max_fetches:
                raise Refusal(
                    "RESOURCE_EXHAUSTED",
                    f"expected at most {self.limits.max_fetches} replicas that fetch a part at once; found another",
                )
            self._fetches[request.part] += 1

            async def write(message: bytes) -> None:
                await context.write(message)
                self._metrics.relayed_bytes.inc(len(message))

            try:
                await context.send_initial_metadata(())
                await send(self.swapper.staging.outgoing, request, write, self.limits)
            finally:
                self._fetches[request.part] -= 1

    async def Commit(self, request: pb.CommitRequest, context: grpc.aio.ServicerContext) -> pb.CommitResponse:
        async with _statuses(context):
            try:
                canary = Canary.from_proto(request.canary) if request.HasField("canary") else None
                done = await self.swapper.commit(request.id.run_id, VersionId(request.id.term, request.id.version), canary)
            except Refusal as refusal:
                if refusal.code == "INTERNAL":
                    self._metrics.swap_failures.inc()
                raise
            finally:
                await self._on_change()
            self._metrics.stall_seconds.observe(done.stall_seconds)
            return pb.CommitResponse(
                version=done.version,
                stall_seconds=done.stall_seconds,
                reload_seconds=done.reload_seconds,
                canary_difference=done.canary_difference,
            )

    async def _next(self, messages: AsyncIterator[bytes]) -> bytes | None:
        """Returns the next message; None: the stream has ended."""
        seconds = self.limits.stream_idle
        try:
            async with asyncio.timeout(seconds):
                return await anext(messages, None)
        except TimeoutError:
            raise Refusal("DEADLINE_EXCEEDED", f"expected more bytes of the part within {seconds:g} s; found none") from None


def _fetch_request(request: pb.StageRelayRequest, offset: int) -> pb.FetchRequest:
    manifest = request.delta.manifest if request.HasField("delta") else request.manifest
    base = request.delta.base if request.HasField("delta") else None
    return pb.FetchRequest(id=manifest.id, part=manifest.part, base=base, offset=offset)


def _largest(content: Manifest | DeltaManifest) -> int:
    """Bytes of the largest range that has its own digest."""
    ranges = content.frames if isinstance(content, DeltaManifest) else content.tensors
    return max((part.nbytes for part in ranges), default=0)


def _content(message: pb.Manifest | pb.DeltaManifest) -> Manifest | DeltaManifest:
    if isinstance(message, pb.Manifest):
        return _parsed(Manifest.from_proto, message)
    return _parsed(DeltaManifest.from_proto, message)


def _parsed(parse: Callable[[M], T], message: M) -> T:
    try:
        return parse(message)
    except ManifestError as error:
        raise Refusal("INVALID_ARGUMENT", f"expected a consistent manifest; {error}") from None


@asynccontextmanager
async def _statuses(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    try:
        yield
    except Refusal as refusal:
        await _abort(context, getattr(grpc.StatusCode, refusal.code), str(refusal))
    except EngineDeadError as error:
        await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


async def _abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("abort raises")
