"""Serves this learner machine's part of a version, whole or as a delta, to replicas that the first machine asks to fetch it.

Invariant:
- A call sends bytes of one complete version only. It ends with a status when the slot is written again.
- Deltas are those of `deltas`: computed from this machine's slots when a version is complete, before anybody asks.
"""

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc
from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.net import rpc
from polyreme.net.ports import join
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import Manifest
from polyreme.weights.wire import CHUNK_BYTES, FETCH, encode_chunk, keep_memory
from polyreme_trainer.weight_sync.deltas import Deltas, EncodedDelta
from polyreme_trainer.weight_sync.version import Version

START_TIMEOUT = 30.0
CLOSE_TIMEOUT = 10.0
REACH_TIMEOUT = 30.0


@dataclass(frozen=True)
class _Running:
    """The thread's event loop, and what runs on it."""

    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    port: int
    deltas: Deltas


class PartServer(weights_pb2_grpc.PartServiceServicer):
    """A gRPC server in a thread of its own, which answers `PartService`, and Fetch of `WeightsService`, from an arena.

    Args:
        arena: this machine's arena; a slot's size is the part's. Close the server first.
        part: the part's number.
        run_id: whose versions they are.
        host: the address to serve on, at any free port.
        security: of the port.
        anchor_interval, threads: see `Deltas`.
    """

    def __init__(
        self,
        arena: Arena,
        part: int,
        run_id: str,
        host: str,
        security: SecurityConfig | None = None,
        anchor_interval: int = 1,
        threads: int = 1,
    ) -> None:
        self._arena, self._part, self._run_id = arena, part, run_id
        self._host, self._security = host, security
        self._interval, self._threads = anchor_interval, threads
        self._term = -1  # of the published versions
        self._running: Future[_Running] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="part server", daemon=True)

    def start(self) -> None:
        """Starts the thread and waits until it serves.

        Raises:
            ConfigError: the address cannot be bound, or the files or token of `security` cannot be used.
        """
        keep_memory()
        self._thread.start()
        self._running.result(START_TIMEOUT)

    @property
    def address(self) -> str:
        """Its host and port, once it has started."""
        return join(self._host, self._running.result(0).port)

    def close(self) -> None:
        """Ends the server and its calls. Idempotent."""
        if self._thread.is_alive():
            running = self._running.result(0)
            running.loop.call_soon_threadsafe(running.stop.set)
            self._thread.join(CLOSE_TIMEOUT)

    def publish(self, manifest: Manifest, slot: int, generation: int) -> None:
        """The part of a new version is complete in `slot`. Starts computing its delta."""
        running, version = self._running.result(0), Version(manifest.to_proto(), slot, generation)
        self._term = manifest.term
        running.loop.call_soon_threadsafe(running.deltas.publish, version, True)

    async def _run(self) -> None:
        stop, name = asyncio.Event(), FETCH.split("/")[1]

        def add(server: grpc.aio.Server) -> None:
            unencoded = grpc.unary_stream_rpc_method_handler(self._fetch, request_deserializer=pb.FetchRequest.FromString)
            server.add_registered_method_handlers(name, {"Fetch": unencoded})
            weights_pb2_grpc.add_PartServiceServicer_to_server(self, server)

        deltas = Deltas(self._arena, self._interval, self._threads, lambda _: None)  # the first machine gives out slots
        names = [name, pb.DESCRIPTOR.services_by_name["PartService"].full_name]
        try:
            async with rpc.serve(self._host, 0, add, names, grace=0.0, security=self._security) as server:
                await server.set_ready(True)
                self._running.set_result(_Running(asyncio.get_running_loop(), stop, server.port, deltas))
                await stop.wait()
        except BaseException as error:
            if self._running.done():
                raise
            self._running.set_exception(error)
        finally:
            deltas.close()

    async def FindDelta(self, request: pb.FindDeltaRequest, context: grpc.aio.ServicerContext) -> pb.FindDeltaResponse:
        """Answers once the delta is computed. The caller's deadline bounds the wait."""
        encoded = await self.delta(request)
        if encoded is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no delta from version {request.base.version} to {request.id.version}"
            )
        assert encoded is not None
        return pb.FindDeltaResponse(delta=encoded.delta.manifest.to_proto(), encode_seconds=encoded.seconds)

    async def delta(self, request: pb.FindDeltaRequest | pb.FetchRequest) -> EncodedDelta | None:
        """The delta that a request asks for, once it is computed; None when there is none."""
        ids = (request.id, request.base)
        if request.part != self._part or any((id.run_id, id.term) != (self._run_id, self._term) for id in ids):
            return None
        return await self._running.result(0).deltas.between(request.base.version, request.id.version)

    async def _fetch(self, request: pb.FetchRequest, context: grpc.aio.ServicerContext) -> None:
        """Sends the part from the request's offset on. The caller's deadline bounds the call."""
        title = f"part {request.part} of version {request.id.version} of term {request.id.term}"
        if request.HasField("base"):
            encoded = await self.delta(request)
            if encoded is None:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"expected the delta to {title} here; found none")
            assert encoded is not None
            await context.send_initial_metadata(())
            payload = memoryview(encoded.delta.payload)
            for position in range(request.offset, len(payload), CHUNK_BYTES):
                await context.write(encode_chunk(position, payload[position : position + CHUNK_BYTES]))
            return
        held = self._find(request)
        if held is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"expected {title} here; found none")
        assert held is not None
        slot, generation = held
        data = self._arena.slot_view(slot)
        await context.send_initial_metadata(())
        for position in range(request.offset, len(data), CHUNK_BYTES):
            message = encode_chunk(position, data[position : position + CHUNK_BYTES])
            if self._arena.generation(slot) != generation:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"other bytes have replaced {title}")
            await context.write(message)

    def _find(self, request: pb.FetchRequest) -> tuple[int, int] | None:
        """The slot with the requested version, and its generation word. None when no slot has it, or a write has begun there."""
        if (request.id.run_id, request.part) != (self._run_id, self._part):
            return None
        wanted = (request.id.term, request.id.version)
        for slot in range(self._arena.slots):
            generation = self._arena.generation(slot)  # read before the version: a write may begin in between
            if generation and generation % 2 == 0 and self._arena.version(slot) == wanted:
                return slot, generation
        return None


async def check_part_server(address: str, part: int, security: SecurityConfig | None) -> None:
    """Checks that another machine's part server can be reached and accepts this machine's certificate and token.

    Raises:
        ConfigError: it refuses the token. UnavailableError: it cannot be reached.
    """
    try:
        async with rpc.connect(address, security) as channel:
            stub = weights_pb2_grpc.WeightsServiceStub(channel)
            async for _ in stub.Fetch(pb.FetchRequest(part=part), timeout=REACH_TIMEOUT):
                pass
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:  # of no run: the server has answered
            return
        if error.code() == grpc.StatusCode.UNAUTHENTICATED and security is not None:
            raise ConfigError(
                f"one token in {security.token_env} on all machines of the learner",
                f"another one at {address}, which serves part {part} of the weights",
                "Set the variable to the same value everywhere, then continue with --resume.",
            ) from None
        raise UnavailableError(
            f"an answer from {address}, which serves part {part} of the weights, within {REACH_TIMEOUT:g} s",
            f"{error.code().name}: {error.details()}",
            "Open its ports to the trainer and to all replicas. "
            "With TLS, its certificate must fit that address (security.server_name).",
        ) from None
