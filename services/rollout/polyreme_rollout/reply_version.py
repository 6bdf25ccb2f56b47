"""Names the policy version in every reply of /v1: in a header, and as `system_fingerprint` of completions.

Invariant: each token of a reply is by one of the versions that were served from the first named one to the last.
"""

import json
from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "polyreme-policy-version"
"""`7`, or `7-8` when the reply began on version 7 and ended on version 8."""

_EVENT = b"data: "


class VersionedReplies:
    """An ASGI middleware around an OpenAI-compatible application.

    The header of a streamed reply names the version at its beginning, since it is sent before the rest is sampled. The
    `system_fingerprint` of each event names the newest version too.

    Args:
        version: the version that is served, once no swap is running; None when none is served.
    """

    def __init__(self, app: ASGIApp, version: Callable[[], Awaitable[int | None]]) -> None:
        self._app, self._version = app, version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, _Reply(send, self._version, await self._version()).send)


class _Reply:
    """Takes the messages of one reply and sends them on."""

    def __init__(self, send: Send, version: Callable[[], Awaitable[int | None]], first: int | None) -> None:
        self._send, self._version, self._first = send, version, first
        self._start: Message | None = None
        self._events = False
        self._rest = b""  # of a body: what is not sent yet

    async def send(self, message: Message) -> None:
        versions = await self._versions()
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[HEADER] = versions
            content = headers.get("content-type", "")
            self._events = content.startswith("text/event-stream")
            if content.startswith("application/json"):
                self._start = message  # its content-length is known at the end of the body
                return
        elif self._start:
            self._rest += message.get("body", b"")
            if message.get("more_body"):
                return
            message = {**message, "body": stamped(self._rest, versions)}
            headers = MutableHeaders(scope=self._start)
            headers["content-length"], headers[HEADER] = str(len(message["body"])), versions
            await self._send(self._start)
        elif self._events:
            *lines, self._rest = (self._rest + message.get("body", b"")).split(b"\n")
            last = b"" if message.get("more_body") else self._rest
            message = {**message, "body": b"".join(_stamped_line(line, versions) + b"\n" for line in lines) + last}
        await self._send(message)

    async def _versions(self) -> str:
        served = (self._first, await self._version())
        return "-".join(dict.fromkeys(str(version) for version in served if version is not None)) or "none"


def stamped(body: bytes, versions: str) -> bytes:
    """The JSON of a completion with its `system_fingerprint` set; any other body as it is."""
    try:
        reply = json.loads(body)
    except ValueError:
        return body
    if not isinstance(reply, dict) or "choices" not in reply:
        return body
    reply["system_fingerprint"] = f"policy-{versions}"
    return json.dumps(reply, ensure_ascii=False, separators=(",", ":")).encode()


def _stamped_line(line: bytes, versions: str) -> bytes:
    return _EVENT + stamped(line.removeprefix(_EVENT), versions) if line.startswith(_EVENT) else line
