"""The session address: the routes by which agents reach their sessions.

    POST /s/ID/v1/chat/completions     (or /v1/chat/completions, since the key alone names a session)
    POST /s/ID/v1/reward               {"reward": 1.0}: adds to the reward of the last turn
    GET  /s/ID/v1/models

Invariant: a request without an open session's key learns nothing but that.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme_environment.agents.reply import completion, error, events
from polyreme_environment.agents.request import RefusedRequestError, parse, read_object
from polyreme_environment.agents.session import AgentSession, SessionTable

_PREFIXES = ("/s/{id}/v1", "/v1")
_OPEN = re.compile(r"/s/[^/]*/v1/|/v1/")
_MODEL = "policy"

Answer = Callable[[AgentSession, bytes], Awaitable[Response]]


def is_session_path(path: str) -> bool:
    """Whether a path is one of this module, whose requests present a session's key in place of the run's token."""
    return _OPEN.match(path) is not None


def base_url(server: str, session: AgentSession) -> str:
    """The session's address on a server `http://host:port`."""
    return f"{server}/s/{session.id}/v1"


def session_routes(sessions: SessionTable) -> list[Route]:
    """The routes."""

    def guarded(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                session = sessions.find(_key(request), request.path_params.get("id"))
                return await answer(session, await request.body())
            except RefusedRequestError as refused:
                return JSONResponse(error(refused.message, refused.code), refused.status)
            except ClientDisconnect:  # within its body
                return Response(status_code=400)

        return answered

    routes: tuple[tuple[str, str, Answer], ...] = (
        ("POST", "/chat/completions", _chat),
        ("POST", "/reward", _reward),
        ("GET", "/models", _models),
    )
    return [
        Route(f"{prefix}{path}", guarded(answer), methods=[method]) for prefix in _PREFIXES for method, path, answer in routes
    ]


def _key(request: Request) -> str:
    """The key of a request: `x-api-key`, or that of `Authorization: Bearer` as OpenAI's clients send it."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return request.headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")


async def _chat(session: AgentSession, body: bytes) -> Response:
    request = parse(body)
    turn = await session.answer(request)
    if request.stream:
        return Response(events(request, turn), media_type="text/event-stream")
    return JSONResponse(completion(request, turn))


async def _reward(session: AgentSession, body: bytes) -> Response:
    given: Any = read_object(body).get("reward")
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise RefusedRequestError(400, f"expected a number as `reward`; found {given!r:.100}", "invalid_request")
    session.reward(float(given))
    return JSONResponse({"status": "ok"})


async def _models(session: AgentSession, body: bytes) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": _MODEL, "object": "model", "created": 0, "owned_by": "polyreme"}]})
