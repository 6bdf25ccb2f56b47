"""Chat requests of /v1 in the form in which the trainer gives messages to the chat template.

Invariant: a message of a request has the tokens that the same message of a data row has. A request that cannot be read is passed on: the
engine's application refuses it.
"""

import json

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polyreme.dataset.chat import Chat, read_chat
from polyreme.errors import DataError

_PATH = "/v1/chat/completions"


class ChatRequests:
    """An ASGI middleware around an OpenAI-compatible application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") not in (_PATH, f"{_PATH}/render"):
            return await self._app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            body = rewritten(body)
        except DataError as error:
            problem = {"error": {"message": str(error), "type": "BadRequestError", "code": 400, "param": "messages"}}
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


def rewritten(body: bytes) -> bytes:
    """The body of a chat request for the engine's application. A body without a list of messages is returned unchanged.

    Tools reach the template as the request has them, where the application would reorder and fill their fields. Without a `tool_choice` it is
    `none`: the reply has the policy's text, and no parser reads calls from it.

    Raises:
        DataError: a message has no text, or another part than text; or a tool or a call cannot be read.
    """
    try:
        asked: object = json.loads(body)
    except (ValueError, RecursionError):
        return body
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
    """The messages as the application's schema has them: arguments are JSON text, which it reads again, and every call has an id."""
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
