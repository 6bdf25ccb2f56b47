"""The session address: the routes by which agents reach their sessions.

    POST /s/ID/...           an API of `APIS`
    POST /s/ID/v1/reward     {"reward": 1.0}: adds to the reward of the last turn
    GET  /s/ID/v1/models

Also without /s/ID, since the key alone names a session; under NeMo Gym's prefix /ng-rollout/KEY/v1, since its agents send no key,
where replies to chat completions and responses have its fields of tokens; and under /by-model/v1 with the key as the request's
`model`, for a client with the same address and headers in all episodes.

Invariant: a request without an open session's key learns nothing but that.
"""

import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from polyreme.dataset.chat import Message
from polyreme.errors import StoreError
from polyreme_environment.agents.apis import APIS, Api, chat, responses
from polyreme_environment.agents.reply import AgentTurn, PartialTurn, encoded, server_sent
from polyreme_environment.agents.request import (
    TOKEN_FIELDS,
    Asked,
    RefusedRequestError,
    TurnRequest,
    as_float,
    bad,
    check_unicode,
    read_object,
)
from polyreme_environment.agents.session import Read

_BY_MODEL = "/by-model"
BY_MODEL = f"{_BY_MODEL}/v1"
_GYM = "/ng-rollout/{key}"
_PREFIXES = ("/s/{id}", "", _BY_MODEL, _GYM, f"{_GYM}/training-token-capture")
_OPEN = re.compile(r"(/s/[^/]*|/by-model|/ng-rollout/[^/]*(/training-token-capture)?|)(/inference)?/v1/")
_MODEL = "policy"
_RETRY_SECONDS = 2
_TASK_CHARS = 512


class OpenSession(Protocol):
    """What a key opens. Its calls raise RefusedRequestError."""

    async def turn(self, read: Read) -> AgentTurn:
        """The turn that answers what `read` reads."""

    def streamed(self, read: Read) -> AsyncGenerator[PartialTurn | AgentTurn, None]:
        """What is certain of that turn, as it is sampled, and at last the turn."""

    async def give(self, amount: float, task: str = "") -> None:
        """Gives a reward. `task`: of a running product's session that was opened without."""


Find = Callable[[str, str | None], OpenSession]
"""The session of a key, and of an address if it names one. Raises RefusedRequestError."""
Answered = Callable[[Request], Awaitable[Response]]
Answer = Callable[[OpenSession, bytes, bool], Awaitable[Response]]
"""Answers a request, by its body and whether it is NeMo Gym's."""


def is_session_path(path: str) -> bool:
    """Whether a path is one of this module, whose requests present a session's key in place of the run's token."""
    return _OPEN.match(path) is not None


def session_routes(find: Find) -> list[Route]:
    """The routes. `find`: among the open sessions of a server."""

    def in_session(answer: Answer, api: Api) -> Answered:
        async def answered(request: Request) -> Response:
            session = find(await _key(request), request.path_params.get("id"))
            return await answer(session, await request.body(), "key" in request.path_params)

        return guarded(answered, api)

    routes: list[tuple[str, str, Answer, Api]] = [("POST", path, _turn_of(api), api) for path, api in APIS.items()]
    routes += [("POST", "/v1/reward", _reward, chat), ("GET", "/v1/models", _models, chat)]
    return [
        Route(f"{prefix}{path}", in_session(answer, api), methods=[method])
        for prefix in _PREFIXES
        for method, path, answer, api in routes
    ]


async def _key(request: Request) -> str:
    """The key of a request: `model` below `_BY_MODEL`, else as `key_of`."""
    if request.scope["path"].startswith(f"{_BY_MODEL}/"):
        model = read_object(await request.body()).get("model")
        check_unicode(model, "`model`")
        return str(model)
    return key_of(request)


def guarded(answer: Answered, api: Api = chat) -> Answered:
    """Answers what is refused in the form of an API."""

    async def answered(request: Request) -> Response:
        try:
            return await answer(request)
        except RefusedRequestError as refused:
            return _refusal(refused, api)
        except StoreError as error:
            return _refusal(_unavailable(error), api)
        except ClientDisconnect:  # within its body
            return Response(status_code=400)

    return answered


def _refusal(refused: RefusedRequestError, api: Api) -> Response:
    """The reply to a refused request, in the format of its API."""
    headers = {"Retry-After": str(_RETRY_SECONDS)} if refused.status in (429, 503) else None
    return JSONResponse(api.error(refused.status, refused.message, refused.code), refused.status, headers)


def _unavailable(error: StoreError) -> RefusedRequestError:
    """The refusal of a request that the log did not take."""
    return RefusedRequestError(503, f"expected an answer of the run's log; found {error.found}", "unavailable")


def key_of(request: Request) -> str:
    """The key of a request: that of the path, `x-api-key`, or that of `Authorization: Bearer` as OpenAI's clients send it."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    return str(request.path_params.get("key") or request.headers.get("x-api-key") or bearer)


def _turn_of(api: Api) -> Answer:
    async def answer(session: OpenSession, body: bytes, is_gym: bool) -> Response:
        asked = read_object(body)
        if is_gym and api in (chat, responses):
            asked[TOKEN_FIELDS] = True

        def read(history: Callable[[str], list[Message]]) -> TurnRequest:
            return api.read(asked, history)

        if not asked.get("stream"):
            return JSONResponse(api.reply(asked, await session.turn(read)))
        parts = session.streamed(read)
        first = await anext(parts)  # a refusal has its status, as long as nothing has been told
        return _EventStream(api, asked, first, parts)

    return answer


class _EventStream(StreamingResponse):
    """A turn as it is sampled. When the client leaves, so does the stream."""

    def __init__(
        self, api: Api, asked: Asked, first: PartialTurn | AgentTurn, rest: AsyncGenerator[PartialTurn | AgentTurn, None]
    ) -> None:
        super().__init__(self._body(api, asked, first), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)

    async def _body(self, api: Api, asked: Asked, first: PartialTurn | AgentTurn) -> AsyncIterator[bytes]:
        writer = api.events(asked)
        try:
            async for part in server_sent(writer, self._parts(first)):
                yield part
        except (RefusedRequestError, StoreError) as found:
            refused = _unavailable(found) if isinstance(found, StoreError) else found
            error = api.error(refused.status, refused.message, refused.code)
            yield encoded([{"type": "error", **error}], is_named=writer.is_named)

    async def _parts(self, first: PartialTurn | AgentTurn) -> AsyncIterator[PartialTurn | AgentTurn]:
        yield first
        async for part in self._rest:
            yield part


async def _reward(session: OpenSession, body: bytes, is_gym: bool) -> Response:
    await session.give(*read_reward(body))
    return JSONResponse({"status": "ok"})


def read_reward(body: bytes) -> tuple[float, str]:
    """The reward of a request, and the task if it names one. Raises RefusedRequestError."""
    asked = read_object(body)
    given: object = asked.get("reward")
    if not math.isfinite(reward := as_float(given)):
        raise bad(f"expected a finite number as `reward`; found {given!r:.100}")
    return reward, read_task(asked)


def read_task(asked: Asked) -> str:
    """The `task` of a request, "" without one. Raises RefusedRequestError."""
    task = asked.get("task")
    if task is not None and (not isinstance(task, str) or not 0 < len(task) <= _TASK_CHARS):
        raise bad(f"expected `task` to be a text of at most {_TASK_CHARS} characters; found {task!r:.100}")
    check_unicode(task, "`task`")
    return task or ""


async def _models(session: OpenSession, body: bytes, is_gym: bool) -> Response:
    """The models in the forms of OpenAI and Anthropic at once."""
    model = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "polyreme"}
    model |= {"type": "model", "display_name": _MODEL, "created_at": "1970-01-01T00:00:00Z"}
    return JSONResponse({"object": "list", "data": [model], "has_more": False, "first_id": _MODEL, "last_id": _MODEL})
