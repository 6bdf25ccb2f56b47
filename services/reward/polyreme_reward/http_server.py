"""uvicorn inside this process's event loop.

Invariant: it installs no signal handler and ends with its block; where there is a token, only /health and /ready are answered without it.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.net import tls as secure

log = logging.getLogger(__name__)

BODY_LIMIT = 32 << 20
_DISCARD = 4  # times the limit
_DISCARD_SECONDS = 5.0


class _TooLarge(Exception):
    pass


class BodyLimit:
    """Answers 413 to a body of more than `limit` bytes, and keeps at most that many of them."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

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
            if not too_large or started:  # else it is the application's answer to its own failure to read the body
                started = True
                await send(message)

        declared = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = declared.isdigit() and int(declared) > self._limit
        if not too_large:
            with suppress(_TooLarge):
                await self._app(scope, counted, watched)
        if too_large and not started:
            log.warning("a request to %s failed: expected a body of at most %d bytes", scope["path"], self._limit)
            await _discard(receive, size, _DISCARD * self._limit)
            body = b'{"detail":"expected a body of at most %d bytes"}' % self._limit
            headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            await send({"type": "http.response.body", "body": body})


async def _discard(receive: Receive, size: int, most: int) -> None:
    """Reads on for a limited time: a client that is still sending would see a reset connection instead of the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while size < most:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the process has its own handlers."""
        yield


@asynccontextmanager
async def serve_http(host: str, port: int, app: Any, grace: float, security: SecurityConfig | None = None) -> AsyncIterator[int]:
    """Serves `app` until the block ends; yields the port. Raises ConfigError: the port is taken, or `security` cannot be used.

    Args:
        host: the address to bind.
        port: 0 takes a free one.
        app: the ASGI application.
        grace: seconds for unfinished requests at the end.
        security: TLS and token; None: plain.
    """
    limited: ASGIApp = BodyLimit(app, BODY_LIMIT)
    if security is not None and (token := secure.token(security)) is not None:
        limited = secure.Bearer(limited, token)
    context = secure.server_context(security) if security is not None else None
    listener = _listen(host, port)
    config = uvicorn.Config(
        limited,
        ssl_context_factory=None if context is None else lambda *_: context,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(grace)),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.up.wait()
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm only on a socket that names TCP; else every reply waits 40 ms for an acknowledgement
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"a free port {port} on {host} for HTTP",
            error.strerror or str(error),
            "Choose another port or host, or end its owner.",
        ) from None
    listener.setblocking(False)
    return listener
