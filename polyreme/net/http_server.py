"""HTTP servers: uvicorn inside the process's event loop, for every service.

Invariant: the server installs no signal handler and ends with its block. With a token, only the probes, and the paths that the
service declares open, are answered without it. Without one, no other web page reaches the server through a browser
(`http_hosts`). A request body beyond the limit is refused and never kept. Slow and idle clients are bounded (`http_connections`).
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.net import tls
from polyreme.net.http_connections import BoundedProtocol, ConnectionLimits, bounded_protocol
from polyreme.net.http_hosts import own_names, refusal

logger = logging.getLogger(__name__)

BODY_LIMIT = 32 << 20
"""Largest request body in bytes."""
PROBES = ("/health", "/ready")
_TOKEN_HEADERS = {b"authorization": b"", b"x-api-key": b"Bearer "}
_DISCARD_FACTOR = 4  # times the limit
_DISCARD_TIMEOUT = 5.0
_TICK_SECONDS, _CANCEL_SECONDS = 1.0, 1.0

ErrorBody = Callable[[int, str], bytes]
"""The JSON of an error, by status and message."""


def detail_body(status: int, message: str) -> bytes:
    """The default error format of services."""
    return json.dumps({"detail": message}).encode()


class RequireBearer:
    """Answers 401 to requests without the token, except to the probes and to paths for which `is_open` is true. Clients of
    OpenAI's form send the token as a bearer, others in `x-api-key`."""

    def __init__(
        self, app: ASGIApp, token: str, is_open: Callable[[str], bool] = lambda path: False, error_body: ErrorBody = detail_body
    ) -> None:
        self._app, self._token, self._is_open, self._error_body = app, token, is_open, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        given = [[form + value for name, value in headers if name == header] for header, form in _TOKEN_HEADERS.items()]
        is_open = scope["path"] in PROBES or self._is_open(scope["path"])
        if is_open or any(len(values) == 1 and tls.authorized(values[0], self._token) for values in given):
            await self._app(scope, receive, send)
            return
        body = self._error_body(401, "expected `authorization: Bearer TOKEN` with this service's token")
        await _send_json(send, 401, body, (b"www-authenticate", b"Bearer"))


class OwnHosts:
    """Answers 421 to requests for a host of another name, and 403 to those of another web page; see `http_hosts`."""

    def __init__(self, app: ASGIApp, names: frozenset[str], error_body: ErrorBody = detail_body) -> None:
        self._app, self._names, self._error_body = app, names, error_body
        self._warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (found := refusal(scope, self._names)) is None:
            await self._app(scope, receive, send)
            return
        status, problem = found
        if not self._warned:
            self._warned = True  # once: the caller is told each time
            logger.warning("a request to %s was refused: %s", scope["path"], problem)
        await _send_json(send, status, self._error_body(status, problem), (b"connection", b"close"))


class BodyLimit:
    """Answers 413 to a body beyond `limit` bytes, and keeps no more than that of it."""

    def __init__(self, app: ASGIApp, limit: int, error_body: ErrorBody = detail_body) -> None:
        self._app, self._limit, self._error_body = app, limit, error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        size = 0
        too_large = started = False

        async def counted() -> Message:
            nonlocal size, too_large
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                too_large = True
                raise _TooLarge
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            if not too_large or started:  # drops the application's own answer to the broken body
                started = True
                await send(message)

        declared = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = declared.isdigit() and int(declared) > self._limit
        if not too_large:
            with suppress(_TooLarge):
                await self._app(scope, counted, watched)
        if too_large and not started:
            problem = f"expected a body of at most {self._limit} bytes; found more. Send less in one request."
            logger.warning("a request to %s failed: %s", scope["path"], problem)
            await _discard(receive, size, _DISCARD_FACTOR * self._limit)
            await _send_json(send, 413, self._error_body(413, problem), (b"connection", b"close"))


async def read_body(receive: Receive) -> bytes | None:
    """A request's body, of at most the server's limit; None: the client has disconnected."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def left(receive: Receive) -> None:
    """Returns when the client, whose body was read, has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError when the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm only for IPPROTO_TCP; otherwise every reply waits 40 ms for an acknowledgement.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"a free port {port} on {host} for HTTP",
            error.strerror or str(error),
            "Choose another port or host, or stop the process that uses it.",
        ) from None
    return bound


@asynccontextmanager
async def serve_http(
    host: str,
    port: int,
    app: ASGIApp,
    drain_timeout: float = 5.0,
    security: SecurityConfig | None = None,
    is_open: Callable[[str], bool] = lambda path: False,
    error_body: ErrorBody = detail_body,
    names: Iterable[str] = (),
    limits: ConnectionLimits | None = None,
    body_bytes: int = BODY_LIMIT,
) -> AsyncIterator[int]:
    """Serves `app` until the block ends. Yields the port.

    Args:
        host: the address to bind.
        port: 0 takes a free one.
        drain_timeout: seconds for running requests at the end.
        security: TLS and token; None: plain.
        is_open: whether a path, in addition to the probes, is served without the token.
        error_body: returns the body of 401, 403, 413 and 421.
        names: host names by which clients reach the server, besides `host` and the machine's own.
        limits: of a client's requests and of all connections; None: the defaults.
        body_bytes: of a request; a larger one gets 413.

    Raises:
        ConfigError: the port is taken, or the security settings cannot be used.
    """
    app = BodyLimit(app, body_bytes, error_body)
    if security is not None and (token := tls.token(security)) is not None:
        app = RequireBearer(app, token, is_open, error_body)
    else:
        served = (security.server_name,) if security is not None and security.server_name else ()
        app = OwnHosts(app, own_names((host, *names, *served)), error_body)
    context = tls.server_context(security) if security is not None else None
    bound = bind(host, port)
    bound.listen(1024)
    bound.setblocking(False)
    protocol = bounded_protocol(limits or ConnectionLimits())
    config = uvicorn.Config(
        app,
        ssl_context_factory=None if context is None else lambda *_: context,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        http=protocol,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
    )
    server = _Server(config, protocol)
    serving, started = asyncio.create_task(server.serve(sockets=[bound])), asyncio.create_task(server.started_event.wait())
    try:
        await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        yield bound.getsockname()[1]
    finally:
        started.cancel()
        server.end()
        await serving


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, protocol: type[BoundedProtocol]) -> None:
        super().__init__(config)
        self._protocol = protocol
        self.started_event, self._ending = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        """Makes `serve` end the server."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Updates the date of the replies until `end`. (uvicorn's own loop polls for its end ten times a second.)"""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._ending.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.started_event.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all connections. (uvicorn leaves those that it accepted meanwhile, or that are busy at its deadline.)"""
        self._protocol.is_ending = True
        loop = asyncio.get_running_loop()
        for listening in [each for server in self.servers for each in server.sockets]:
            loop.remove_reader(listening.fileno())
        await asyncio.sleep(0)  # what asyncio has just accepted gets its transport, which it cannot behind `Server.close`
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled
            await asyncio.wait(self.server_state.tasks, timeout=_CANCEL_SECONDS)
        for connection in list(self.server_state.connections):
            cast("BoundedProtocol", connection).end()
        await asyncio.sleep(0)  # in which asyncio closes their sockets

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the process has its own handlers."""
        yield


class _TooLarge(Exception):
    pass


async def _discard(receive: Receive, size: int, limit: int) -> None:
    """Reads and drops up to `limit` bytes. Otherwise a client that is still sending would see a reset connection instead of the
    response."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_TIMEOUT):
            while size < limit:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


async def _send_json(send: Send, status: int, body: bytes, header: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), header]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
