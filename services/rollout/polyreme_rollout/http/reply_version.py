"""Names the policy version in every reply of /v1: in a header, and as `system_fingerprint` of completions. Refuses versions that
a request excludes.

Invariant: each token of a reply was sampled by a version between the first and the last named one, and by no version that the
request excludes.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "polyreme-policy-version"
"""`7`, or `7-8` when the reply began on version 7 and ended on version 8."""

MIN_HEADER = "polyreme-min-policy-version"
"""Request header: the oldest version that may answer."""
EXACT_HEADER = "polyreme-exact-policy-version"
"""Request header: the only version that may answer."""

_EVENT = b"data: "


@dataclass(frozen=True)
class WantedVersion:
    """The version constraints of a request; None: any version."""

    minimum: int | None
    exact: int | None

    @classmethod
    def of(cls, headers: Headers) -> "WantedVersion":
        """Raises ValueError for headers that are not numbers."""
        return cls(*(int(text) if (text := headers.get(name)) is not None else None for name in (MIN_HEADER, EXACT_HEADER)))

    def refusal(self, served: int | None) -> tuple[int, str] | None:
        """The status and the reason why this version may not answer; None: it may. Without a version, the engine's tokens may be
        of one that has failed its canary."""
        if self.exact is not None and served != self.exact:
            return 412, f"expected policy version {self.exact}; found {served}"
        if self.minimum is not None and (served is None or served < self.minimum):
            return 412, f"expected policy version {self.minimum} or newer; found {served}"
        return None if served is not None else (503, "expected a policy version; found that none is served any more")


class VersionedReplies:
    """An ASGI middleware around an OpenAI-compatible application.

    The header of a streamed reply names only its first version, since it is sent before the rest is sampled. The
    `system_fingerprint` of each event also names the newest version.

    Args:
        version: waits for a running swap to end and returns the served version, or None.
    """

    def __init__(self, app: ASGIApp, version: Callable[[], Awaitable[int | None]]) -> None:
        self._app, self._version = app, version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = await self._version()
        try:
            wanted = WantedVersion.of(Headers(scope=scope))
        except ValueError as error:
            return await JSONResponse(_error(f"expected a policy version; {error}"), 400)(scope, receive, send)
        if (refusal := wanted.refusal(served)) is not None:
            headers = {HEADER: "none" if served is None else str(served)}
            return await JSONResponse(_error(refusal[1]), refusal[0], headers)(scope, receive, send)
        await self._app(scope, receive, _Reply(send, self._version, served, wanted).send)


class _Reply:
    """Forwards the messages of one reply, until an excluded version samples."""

    def __init__(
        self, send: Send, version: Callable[[], Awaitable[int | None]], first: int | None, wanted: WantedVersion
    ) -> None:
        self._send, self._version, self._first, self._wanted = send, version, first, wanted
        self._refused = False
        self._start: Message | None = None
        self._events = False
        self._rest = b""  # the unsent part of a body

    async def send(self, message: Message) -> None:
        if self._refused:
            return
        last = await self._version()
        versions, refusal = self._named(last), self._wanted.refusal(last)
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
            message = {**message, "body": _encoded(_error(refusal[1])) if refusal else stamped(self._rest, versions)}
            self._start["status"] = refusal[0] if refusal else self._start["status"]
            headers = MutableHeaders(scope=self._start)
            headers["content-length"], headers[HEADER] = str(len(message["body"])), versions
            await self._send(self._start)
        elif self._events and refusal:
            self._refused = True
            message = {"type": "http.response.body", "body": _EVENT + _encoded(_error(refusal[1])) + b"\n\n"}
        elif self._events:
            *lines, self._rest = (self._rest + message.get("body", b"")).split(b"\n")
            end = b"" if message.get("more_body") else self._rest
            message = {**message, "body": b"".join(_stamped_line(line, versions) + b"\n" for line in lines) + end}
        await self._send(message)

    def _named(self, last: int | None) -> str:
        served = (self._first, last)
        return "-".join(dict.fromkeys(str(version) for version in served if version is not None)) or "none"


def stamped(body: bytes, versions: str) -> bytes:
    """The JSON of a completion with its `system_fingerprint` set; any other body unchanged."""
    try:
        reply = json.loads(body)
    except ValueError:
        return body
    if not isinstance(reply, dict) or "choices" not in reply:
        return body
    reply["system_fingerprint"] = f"policy-{versions}"
    return _encoded(reply)


def _error(text: str) -> dict[str, object]:
    return {"error": {"message": text, "type": "policy_version", "code": "policy_version"}}


def _encoded(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _stamped_line(line: bytes, versions: str) -> bytes:
    return _EVENT + stamped(line.removeprefix(_EVENT), versions) if line.startswith(_EVENT) else line
