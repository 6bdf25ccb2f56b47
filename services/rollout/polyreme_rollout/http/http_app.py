"""A replica's HTTP application: /health, /ready, /metrics, and the engine's OpenAI-compatible /v1.

Invariant: /v1 answers from a served policy version or not at all, never from the initial random weights, and each reply names
that version. A chat is rendered as in training (see `JsonRequests`). The engine salts its requests, so that they share no cached
prefix with an earlier policy.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyreme.dataset.chat import Chat, read_chat
from polyreme.dataset.strict_json import from_text
from polyreme.errors import DataError
from polyreme.net.http_server import read_body
from polyreme_rollout.http.reply_version import VersionedReplies
from polyreme_rollout.metrics import ReplicaMetrics

_PATH = "/v1/chat/completions"


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
        openai: creates the /v1 application. Called at the first request to /v1 or /openapi.json, since its imports take seconds.
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
        await VersionedReplies(JsonRequests(await v1()), version)(scope, receive, send)

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


class JsonRequests:
    """An ASGI middleware around an OpenAI-compatible application, which gets only JSON that it can also write: the values of a
    wrong request are in its errors. A message has the tokens that the same message of a data row has."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        if (body := await read_body(receive)) is None:
            return None
        try:
            if scope["path"].rstrip("/") in (_PATH, f"{_PATH}/render"):
                body = rewritten(body)
            else:
                _read(body)
        except DataError as error:
            problem = {"error": {"message": str(error), "type": "BadRequestError", "code": 400, "param": None}}
            return await JSONResponse(problem, 400)(scope, receive, send)
        headers = MutableHeaders(raw=list(Headers(scope=scope).raw))
        headers["content-length"] = str(len(body))
        await self._app({**scope, "headers": headers.raw}, _Replayed(body, receive).receive, send)


class _Replayed:
    """Receives a body that was read already, then what follows it."""

    def __init__(self, body: bytes, rest: Receive) -> None:
        self._body: bytes | None = body
        self._rest = rest

    async def receive(self) -> Message:
        if self._body is None:
            return await self._rest()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _read(body: bytes) -> object:
    """The JSON of a request; an empty text without a body. Raises DataError also for NaN and for half of a character."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError("a body in UTF-8", f"other bytes at {error.start}", "Fix the request.") from None
    return from_text(text, "the request's body", "Fix the request.")


def rewritten(body: bytes) -> bytes:
    """The body of a chat request for the engine's application. A body without a list of messages is returned unchanged.

    Tools reach the template as the request has them, where the application would reorder and fill their fields. Without a
    `tool_choice` it is `none`: the reply has the policy's text, and no parser reads calls from it.

    Raises:
        DataError: as `_read`; a message has no text, or another part than text; or a tool or a call cannot be read.
    """
    asked = _read(body)
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list) or not asked["messages"]:
        return body
    chat = read_chat(asked["messages"], "`messages`", asked.get("tools"))
    found = {**{key: value for key, value in asked.items() if key != "tools"}, "messages": _messages(chat)}
    if chat.tools is not None:
        options = asked.get("chat_template_kwargs")
        found |= {"tools": list(chat.tools), "tool_choice": asked.get("tool_choice") or "none"}
        found["chat_template_kwargs"] = {"tools": list(chat.tools), **(options if isinstance(options, dict) else {})}
    return json.dumps(found, ensure_ascii=True).encode()


def _messages(chat: Chat) -> list[dict[str, object]]:
    """The messages in the application's schema: arguments are JSON text, which it reads again, and every call has an id."""
    return [
        message
        if "tool_calls" not in message
        else {
            **message,
            "tool_calls": [
                {
                    "id": f"call_{place}",
                    "type": "function",
                    **call,
                    "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)},
                }
                for place, call in enumerate(message["tool_calls"])
            ],
        }
        for message in chat.messages
    ]
