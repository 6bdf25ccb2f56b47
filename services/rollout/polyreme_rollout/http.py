"""HTTP beside gRPC: /health, /ready, /metrics, and vLLM's own OpenAI-compatible /v1 on the same engine.

Kept here: /v1 answers from the live policy or not at all, never from the random weights of the start. (That it shares no cached
prefix with an earlier policy is the engine's to keep: its application salts every request.)
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.net import tls as secure
from polyreme_rollout.metrics import Metrics

STOP_SECONDS = 5


def make_app(
    healthy: Callable[[], bool], ready: Callable[[], bool], metrics: Metrics, openai: Callable[[], Awaitable[Any]]
) -> Callable[..., Awaitable[None]]:
    """The ASGI application.

    Args:
        healthy: whether the engine lives.
        ready: whether a version is served.
        metrics: what /metrics shows.
        openai: makes the application that gets /v1; asked at the first request to it, since its imports take seconds.
    """
    own = FastAPI(title="Polyreme rollout replica")

    @own.get("/health")
    async def health() -> Response:
        return _status(healthy(), "the engine's processes are gone")

    @own.get("/ready")
    async def is_ready() -> Response:
        return _status(ready(), "no policy version is served")

    @own.get("/metrics")
    async def show_metrics() -> Response:
        registry: Collector = metrics.registry
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    lock = asyncio.Lock()
    made: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await own(scope, receive, send)
        if not ready():
            return await _status(False, "no policy version is served")(scope, receive, send)
        async with lock:
            if not made:
                made.append(await openai())
        await made[0](scope, receive, send)

    return app


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError: the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that asyncio turns Nagle's algorithm off
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"a free port {port} on {host}", error.strerror or str(error), "Choose another port or host, or end its owner."
        ) from None
    return bound


@asynccontextmanager
async def serve(app: Any, bound: socket.socket, security: SecurityConfig | None = None) -> AsyncIterator[int]:
    """Serves on a bound socket until the block ends. Yields the port. Raises ConfigError: `security` cannot be used."""
    if security is not None and (token := secure.token(security)) is not None:
        app = secure.Bearer(app, token)
    context = secure.server_context(security) if security is not None else None
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=STOP_SECONDS)
    if context is not None:
        config.ssl_context_factory = lambda *_: context
    server = _Server(config)
    task = asyncio.ensure_future(server.serve(sockets=[bound]))
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await task


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # they are the service's


def _status(good: bool, otherwise: str) -> Response:
    return JSONResponse({"status": "ok"} if good else {"status": otherwise}, status_code=200 if good else 503)
