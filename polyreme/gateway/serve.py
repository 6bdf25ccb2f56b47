"""A running gateway of one run.

Invariant: the gateway requires of its callers the token and certificates that the run's services require, and presents its own to
the replicas. It answers the list of models of /v1 itself, and forwards completions. Every error of /v1 has OpenAI's format.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.experience.run import Run
from polyreme.gateway.client import ReplicaHttp
from polyreme.gateway.forward import Forwarder
from polyreme.gateway.limits import GatewayLimits
from polyreme.gateway.metrics import GatewayMetrics
from polyreme.gateway.names import ModelNames, parse_aliases
from polyreme.gateway.replicas import ReplicaTable
from polyreme.gateway.reply import error_body, server_error_body
from polyreme.net.http_server import serve_http

DRAIN_TIMEOUT = 20.0
FORWARDED = ("/v1/chat/completions", "/v1/completions")


@asynccontextmanager
async def serve_gateway(run: Run, host: str, port: int, aliases: Sequence[str], limits: GatewayLimits) -> AsyncIterator[int]:
    """Serves a run's /v1 until the block ends. Yields the port.

    Args:
        host, port: address to bind; port 0 takes a free one.
        aliases: see `parse_aliases`.

    Raises:
        ConfigError: an alias, the port, or the run's security settings cannot be used.
    """
    config = await run.config()
    names = ModelNames(config.name, parse_aliases(aliases, config.name))
    metrics = GatewayMetrics()
    async with ReplicaHttp(config.security, limits.requests) as http:
        table = ReplicaTable(run, http, limits)
        app = make_app(names, table, Forwarder(names, table, http, metrics, limits), metrics)
        await table.refresh()
        serving = asyncio.current_task()
        assert serving is not None
        following = asyncio.create_task(table.keep_current(), name="replicas of the gateway")
        following.add_done_callback(lambda task: None if task.cancelled() else serving.cancel())  # a bug ends the block
        try:
            async with serve_http(
                host, port, app, DRAIN_TIMEOUT, config.security, error_body=server_error_body, body_bytes=limits.body_bytes
            ) as bound:
                yield bound
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


def make_app(names: ModelNames, table: ReplicaTable, forwarder: Forwarder, metrics: GatewayMetrics) -> Starlette:
    """The ASGI application."""
    created = int(time.time())

    def card(name: str) -> dict[str, object]:
        lengths = [each.max_model_len for each in table.replicas if each.max_model_len]
        return {
            "id": name, "object": "model", "created": created, "owned_by": "polyreme", "max_model_len": min(lengths, default=None)
        }  # fmt: skip

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card(name) for name in names.listed(table.versions)]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in (listed := names.listed(table.versions)):
            raise HTTPException(404, f"expected one of {', '.join(listed)}; found {name}. Fix the model's name.")
        return JSONResponse(card(name))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        if table.versions:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "no replica serves a version"}, status_code=503)

    async def show_metrics(request: Request) -> Response:
        metrics.replicas.set(sum(each.version is not None for each in table.replicas))
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body = error_body(error.detail, "invalid_request_error", "not_found" if error.status_code == 404 else "invalid_request")
        return Response(body, error.status_code, error.headers, media_type="application/json")

    async def failed(request: Request, error: Exception) -> Response:
        found = f"expected an answer of the gateway; found {type(error).__name__}. See its log."
        return Response(error_body(found, "server_error", "internal_error"), 500, media_type="application/json")

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", show_metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        *(Route(path, forwarder, methods=["POST"]) for path in FORWARDED),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: refused, Exception: failed})
