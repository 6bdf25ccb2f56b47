"""Bodies and errors of the Tinker API over HTTP.

Invariant: every error is JSON with `error` and `category`, as the SDK expects it.
"""

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zstandard
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from polyreme.errors import StoreError
from polyreme.experience.requests import TENANT_DIGITS
from polyreme.net.http_server import BODY_LIMIT
from polyreme_trainer.service.errors import TenantError

PREFIX = "/api/v1"
HEALTH = f"{PREFIX}/healthz"


@dataclass(frozen=True)
class ApiCall:
    """A request: who sends it, and its body, decompressed."""

    tenant: str
    body: bytes


Handler = Callable[[ApiCall], Awaitable[Response]]
"""Answers a request."""


def tenant_of(request: HttpRequest | Scope) -> str:
    """Who sends a request, or one with an ASGI scope. Programs with the same key are one tenant."""
    headers = request.headers if isinstance(request, HttpRequest) else Headers(scope=request)
    return tenant_with(headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer "))


def refusal(status: int, message: str) -> Response:
    """An answer with an error."""
    return JSONResponse(_body(message), status_code=status)


def tenant_with(key: str) -> str:
    """The tenant that has a key: a digest of it."""
    return hashlib.sha256(key.encode()).hexdigest()[:TENANT_DIGITS]


def endpoint(handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
    """A Starlette endpoint of a handler."""

    async def answer(request: HttpRequest) -> Response:
        body = await request.body()
        if (encoding := request.headers.get("content-encoding", "identity")) == "zstd":
            body = _decompressed(body)
        elif encoding != "identity":
            raise TenantError(f"not supported: content-encoding {encoding!r:.40}; expected zstd or none")
        return await handler(ApiCall(tenant_of(request), body))

    return answer


def _decompressed(body: bytes) -> bytes:
    """A zstd body of at most BODY_LIMIT bytes. Raises TenantError."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            whole = reader.read(BODY_LIMIT + 1)
    except zstandard.ZstdError as error:
        raise TenantError(f"expected a zstd body; found {error}") from None
    if len(whole) > BODY_LIMIT:
        raise HTTPException(413, f"expected a body of at most {BODY_LIMIT} bytes; found more")
    return whole


def is_open(path: str) -> bool:
    """Whether a path needs no key, as /health and /ready: the SDK's probe, and addresses of files, which are signed."""
    return path == HEALTH or path.startswith(f"{PREFIX}/files/")


def error_body(status: int, message: str) -> bytes:
    """The JSON of an error that the server answers before the application."""
    return json.dumps(_body(message)).encode()


def _body(message: str) -> dict[str, str]:
    return {"error": message, "detail": message, "category": "user"}


async def refused(request: HttpRequest, error: Exception) -> Response:
    """The answer to a request that the API does not take, that its tenant has to correct, or that finds no log: the SDK sends
    this one again."""
    if isinstance(error, StoreError):
        return JSONResponse({**_body(str(error)), "category": "server"}, status_code=503)
    if not isinstance(error, HTTPException):
        return refusal(400, str(error))
    message = error.detail
    if error.status_code in (404, 405) and message in ("Not Found", "Method Not Allowed"):
        message = f"not supported: {request.method} {request.url.path}"
    return refusal(error.status_code, message)
