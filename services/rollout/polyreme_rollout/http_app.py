"""A replica's HTTP application: /health, /ready, /metrics, and the engine's OpenAI-compatible /v1.

Invariant: /v1 answers from a served policy version or not at all, never from the random weights of the start. The engine salts its
requests, so that they share no cached prefix with an earlier policy.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp

from polyreme_rollout.metrics import ReplicaMetrics


def make_app(
    healthy: Callable[[], bool], ready: Callable[[], bool], metrics: ReplicaMetrics, openai: Callable[[], Awaitable[ASGIApp]]
) -> ASGIApp:
    """The ASGI application.

    Args:
        healthy: whether the engine runs.
        ready: whether a version is served.
        metrics: the content of /metrics.
        openai: makes the application of /v1. Called at the first request to it, because its imports take seconds.
    """
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

    lock = asyncio.Lock()
    made: list[ASGIApp] = []

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


def _status(good: bool, otherwise: str) -> Response:
    return JSONResponse({"status": "ok"} if good else {"status": otherwise}, status_code=200 if good else 503)
