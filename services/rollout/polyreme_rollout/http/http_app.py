"""A replica's HTTP application: /health, /ready, /metrics, and the engine's OpenAI-compatible /v1.

Invariant: /v1 answers from a served policy version or not at all, never from the initial random weights, and each reply names
that version. A chat is rendered as in training (see `chat_requests`). The engine salts its requests, so that they share no cached prefix
with an earlier policy.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from polyreme_rollout.http.chat_requests import ChatRequests
from polyreme_rollout.http.reply_version import VersionedReplies
from polyreme_rollout.metrics import ReplicaMetrics


def make_app(
    healthy: Callable[[], bool],
    ready: Callable[[], bool],
    version: Callable[[], Awaitable[int | None]],
    metrics: ReplicaMetrics,
    openai: Callable[[], Awaitable[FastAPI]],
) -> ASGIApp:
    """The ASGI application.

    Args:
        healthy: whether the engine runs.
        ready: whether a version is served.
        version: waits for a running swap to end and returns the served version.
        metrics: the content of /metrics.
        openai: creates the application of /v1. Called at the first request to /v1 or /openapi.json, because its imports take seconds.
    """
    own = _own_app(healthy, ready, metrics)
    lock = asyncio.Lock()
    made: list[FastAPI] = []

    async def v1() -> FastAPI:
        async with lock:
            if not made:
                made.append(await openai())
            return made[0]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await own(scope, receive, send)
        if scope["path"] == "/openapi.json":
            return await JSONResponse(_both(own.openapi(), (await v1()).openapi()))(scope, receive, send)
        if not scope["path"].startswith("/v1/"):
            return await own(scope, receive, send)
        if not ready():
            return await _status(False, "no policy version is served")(scope, receive, send)
        await VersionedReplies(ChatRequests(await v1()), version)(scope, receive, send)

    return app


def _own_app(healthy: Callable[[], bool], ready: Callable[[], bool], metrics: ReplicaMetrics) -> FastAPI:
    own = FastAPI(title="Polyreme rollout replica")

    @own.get("/health")
    async def health() -> Response:
        return _status(healthy(), "the engine's processes have exited")

    @own.get("/ready")
    async def is_ready() -> Response:
        return _status(ready(), "no policy version is served")

    @own.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return own


def _both(own: dict[str, Any], v1: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document of our own paths and of the reachable paths of the engine's application."""
    paths = {path: item for path, item in v1["paths"].items() if path.startswith("/v1/")}
    return {**own, "paths": own["paths"] | paths, "components": v1.get("components", {})}


def _status(good: bool, otherwise: str) -> Response:
    return JSONResponse({"status": "ok"} if good else {"status": otherwise}, status_code=200 if good else 503)
