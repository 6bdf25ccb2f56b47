"""Serves the part of a version that this machine of the learner holds, to replicas that the first machine asks to fetch it.

Invariant: a call sends bytes of one complete version only. It ends with a status when the slot is written again.
"""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import grpc

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.net import rpc
from polyreme.net.ports import join
from polyreme.weights.arena import Arena
from polyreme.weights.wire import CHUNK_BYTES, FETCH, encode_chunk, keep_memory

START_TIMEOUT = 30.0
CLOSE_TIMEOUT = 10.0


class PartServer:
    """A gRPC server in a thread of its own, which answers Fetch of `WeightsService` from an arena.

    Args:
        arena: this machine's arena; a slot's size is the part's. Close the server first.
        part: the part's number.
        run_id: whose versions they are.
        host: the address to serve on, at any free port.
        security: of the port.

    Raises:
        ConfigError: the address cannot be bound, or the files or token of `security` cannot be used.
    """

    def __init__(self, arena: Arena, part: int, run_id: str, host: str, security: SecurityConfig | None = None) -> None:
        self._arena, self._part, self._run_id = arena, part, run_id
        self._host, self._security = host, security
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="part server", daemon=True)
        keep_memory()
        self._thread.start()
        self.address = join(host, self._running.result(START_TIMEOUT)[2])

    def close(self) -> None:
        """Ends the server and its calls. Idempotent."""
        if self._thread.is_alive():
            loop, stop, _ = self._running.result(0)
            loop.call_soon_threadsafe(stop.set)
            self._thread.join(CLOSE_TIMEOUT)

    async def _run(self) -> None:
        stop, name = asyncio.Event(), FETCH.split("/")[1]

        def add(server: grpc.aio.Server) -> None:
            unencoded = grpc.unary_stream_rpc_method_handler(self._fetch, request_deserializer=pb.FetchRequest.FromString)
            server.add_registered_method_handlers(name, {"Fetch": unencoded})

        try:
            async with rpc.serve(self._host, 0, add, [name], grace=0.0, security=self._security) as server:
                await server.set_ready(True)
                self._running.set_result((asyncio.get_running_loop(), stop, server.port))
                await stop.wait()
        except BaseException as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    async def _fetch(self, request: pb.FetchRequest, context: Any) -> None:
        """Sends the part from the request's offset on. The caller's deadline bounds the call."""
        title = f"part {request.part} of version {request.id.version} of term {request.id.term}"
        slot = self._slot_of(request)
        if slot is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"expected {title} here; found none")
        assert slot is not None
        generation, data = self._arena.generation(slot), self._arena.slot_view(slot)
        await context.send_initial_metadata(())
        for position in range(request.offset, len(data), CHUNK_BYTES):
            message = encode_chunk(position, data[position : position + CHUNK_BYTES])
            if self._arena.generation(slot) != generation:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"other bytes have replaced {title}")
            await context.write(message)

    def _slot_of(self, request: pb.FetchRequest) -> int | None:
        """The slot with the requested version; None when there is none."""
        if (request.id.run_id, request.part) != (self._run_id, self._part) or request.HasField("base"):
            return None
        wanted, slots = (request.id.term, request.id.version), range(self._arena.slots)
        held = (slot for slot in slots if self._arena.generation(slot) % 2 == 0 and self._arena.generation(slot))
        return next((slot for slot in held if self._arena.version(slot) == wanted), None)
