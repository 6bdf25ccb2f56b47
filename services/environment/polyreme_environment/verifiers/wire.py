"""The client of an env server: ZMQ, msgpack.

A request is frames `[id, method, payload]`. Its answer is 0 or more `[id, "delta", payload]`, then one `[id, "reply", payload]`.

Invariant: every request ends with its reply or an error. A run whose caller leaves is cancelled at the server.
"""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgpack
import zmq
import zmq.asyncio

from polyreme.isolation.processes import INVALID_MESSAGE
from polyreme.process.tasks import end_all

REPLY_BYTES = 64 << 20
"""Maximum of all that a server says of one run."""


class EnvServerLostError(Exception):
    """The server has ended before its reply."""


@dataclass
class _Request:
    on_delta: Callable[[dict[str, object]], None] | None
    nbytes: int = 0
    reply: "asyncio.Future[dict[str, object]]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EnvServerClient:
    """A connection to the server at a ZMQ address."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self._requests: dict[bytes, _Request] = {}
        self._receiving = asyncio.create_task(self._receive())

    async def is_healthy(self, seconds: float) -> bool:
        """Whether the server answers in time."""
        try:
            async with asyncio.timeout(seconds):
                return bool((await self._call("health", {})).get("success"))
        except TimeoutError:
            return False

    async def run(self, body: dict[str, object], on_delta: Callable[[dict[str, object]], None]) -> dict[str, object]:
        """The reply to a run; `on_delta` gets what comes before it.

        Raises:
            EnvServerLostError: see `lose`. And what `on_delta` raises, for which the run is cancelled too.
        """
        return await self._call("run", body, on_delta)

    def lose(self, why: str) -> None:
        """Ends all requests: the server has ended."""
        for request in self._requests.values():
            if not request.reply.done():
                request.reply.set_exception(EnvServerLostError(why))

    async def close(self) -> None:
        """Ends the connection and all requests."""
        self.lose("the client ends")
        await end_all([self._receiving])
        self._socket.close()
        self._context.term()

    async def _call(
        self, method: str, body: dict[str, object], on_delta: Callable[[dict[str, object]], None] | None = None
    ) -> dict[str, object]:
        name = uuid.uuid4().hex.encode()
        request = self._requests[name] = _Request(on_delta)
        try:
            await self._send(name, method, body)
            return await request.reply
        finally:
            del self._requests[name]
            if method == "run" and (not request.reply.done() or request.reply.cancelled() or request.reply.exception()):
                with suppress(zmq.ZMQError):  # its socket is closed, and the server ends
                    await self._send(uuid.uuid4().hex.encode(), "cancel", {"request_id": name.decode()})

    async def _send(self, name: bytes, method: str, body: dict[str, object]) -> None:
        await self._socket.send_multipart([name, method.encode(), msgpack.packb(body)])

    async def _receive(self) -> None:
        """Gives each message to its request. One that is not understood ends its request, if it names one."""
        while True:
            name, *rest = await self._socket.recv_multipart()
            request = self._requests.get(name)
            if request is None or request.reply.done():
                continue  # of a run that was cancelled
            try:
                kind, payload = rest
                request.nbytes += len(payload)
                if request.nbytes > REPLY_BYTES:
                    raise ValueError(f"expected at most {REPLY_BYTES} bytes of a run; found more")
                message = msgpack.unpackb(payload, raw=False, strict_map_key=False)
                if not isinstance(message, dict):
                    raise ValueError(f"expected a map; found a {type(message).__name__}")
                if kind == b"reply":
                    request.reply.set_result(message)
                elif request.on_delta is not None:
                    request.on_delta(message)
            except INVALID_MESSAGE as error:
                request.reply.set_exception(error)
