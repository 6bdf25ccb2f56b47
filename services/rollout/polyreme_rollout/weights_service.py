"""The weights calls on the wire: protobuf in, the swap machine's verdict as a gRPC status out."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.weights.manifest import Manifest, ManifestError
from polyreme_rollout.engine.base import EngineDeadError
from polyreme_rollout.metrics import Metrics
from polyreme_rollout.swap import Refusal, Swapper, VersionId


class WeightsService(pb_grpc.WeightsServiceServicer):
    """Args: swapper; metrics; on_change: called after every commit, done or failed."""

    def __init__(self, swapper: Swapper, metrics: Metrics, on_change: Callable[[], Awaitable[None]]) -> None:
        self._swapper, self._metrics, self._on_change = swapper, metrics, on_change

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        async with _statuses(context):
            try:
                self._swapper.probe(request.run_id, request.term, request.arena_path, request.nonce)
            except Refusal as refusal:
                if refusal.code != "NOT_FOUND":
                    raise
                return pb.ProbeResponse(can_map=False, reason=str(refusal))
            return pb.ProbeResponse(can_map=True)

    async def StageArena(self, request: pb.StageArenaRequest, context: Any) -> pb.StageResponse:
        async with _statuses(context):
            try:
                manifest = Manifest.from_proto(request.manifest)
            except ManifestError as error:
                raise Refusal("INVALID_ARGUMENT", f"the manifest contradicts itself: {error}") from None
            seconds = await self._swapper.stage(manifest, request.arena_path, request.slot, request.generation)
            return pb.StageResponse(verify_seconds=seconds)

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        async with _statuses(context):
            try:
                done = await self._swapper.commit(request.id.run_id, VersionId(request.id.term, request.id.version))
            except Refusal as refusal:
                if refusal.code == "INTERNAL":
                    self._metrics.swap_failures.inc()
                raise
            finally:
                await self._on_change()
            self._metrics.stall_seconds.observe(done.stall_seconds)
            return pb.CommitResponse(version=done.version, stall_seconds=done.stall_seconds, reload_seconds=done.reload_seconds)


@asynccontextmanager
async def _statuses(context: Any) -> AsyncIterator[None]:
    try:
        yield
    except Refusal as refusal:
        await _abort(context, getattr(grpc.StatusCode, refusal.code), str(refusal))
    except EngineDeadError as error:
        await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))


async def _abort(context: Any, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError("abort raises")
