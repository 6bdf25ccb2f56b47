"""A gateway's HTTP application: /v1, /health, /ready and /metrics.

Invariant: the gateway itself answers the list of models of /v1, and forwards completions. Every error of /v1 has OpenAI's format.
"""

import time

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.gateway.forward import Forwarder
from polyreme.gateway.metrics import GatewayMetrics
from polyreme.gateway.names import ModelNames
from polyreme.gateway.replicas import ReplicaTable
from polyreme.gateway.reply import error_body

FORWARDED = ("/v1/chat/completions", "/v1/completions")


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
