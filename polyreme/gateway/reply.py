"""The reply to one request of a gateway: a whole body, a stream of events, or an error in OpenAI's format.

Invariant: a reply is sent once. An error is a status while nothing has been sent, and the stream's last event afterwards. Only
whole events are forwarded, each unchanged, so that a stream can break between two events but never inside one.
"""

import json
from collections.abc import Iterable

from starlette.types import Send

Headers = Iterable[tuple[bytes, bytes]]

RETRY_AFTER = (b"retry-after", b"1")
"""Retry-After of 429 and 503 in seconds: about the time until a request ends or a replica is found."""
_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
_SERVER_CODES = {401: "invalid_api_key", 403: "foreign_page", 413: "body_too_large", 421: "unknown_host"}


def error_body(message: str, kind: str, code: str) -> bytes:
    """An error in OpenAI's format."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def server_error_body(status: int, message: str) -> bytes:
    """The body of an error of the HTTP server, in OpenAI's format."""
    return error_body(message, "invalid_request_error", _SERVER_CODES[status])


class Reply:
    """One reply.

    Attributes:
        status: the sent status; 0: none yet.
        failed: whether a stream ended with an error.
    """

    def __init__(self, send: Send) -> None:
        self._send, self.status, self.failed = send, 0, False

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, headers: Headers, events: bytes) -> None:
        """Sends whole events, the first time with the headers."""
        if not self.status:
            await self._start(200, headers)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """Ends a stream."""
        await self._send({"type": "http.response.body", "body": b""})

    async def end_failed(self) -> None:
        """Ends a stream whose last event is an error."""
        self.failed = True
        await self._send({"type": "http.response.body", "body": DONE})

    async def fail(self, status: int, message: str, code: str) -> None:
        """The error `message`. `status` applies if nothing has been sent."""
        body = error_body(message, "server_error" if status >= 500 else "invalid_request_error", code)
        if self.status:
            self.failed = True
            await self._send({"type": "http.response.body", "body": b"data: %b\n\n%b" % (body, DONE)})
            return
        retry = [RETRY_AFTER] if status in (429, 503) else []
        await self.whole(status, [(b"content-type", b"application/json"), *retry], body)

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})
        self.status = status


class EventSplitter:
    """Cuts a stream of bytes at the ends of its events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The events that `data` completes; may be empty."""
        events, end, self._rest = (self._rest + data).rpartition(_END)
        return events + end


def is_done(events: bytes) -> bool:
    """Whether whole events end with the end of an OpenAI stream."""
    return events.endswith(DONE)


def error_code(events: bytes) -> str | None:
    """The code of the OpenAI error in the last event, '' if it has no code; None: the last event is not an error."""
    *_, last = events.removesuffix(_END).rsplit(_END, 1)
    event: dict[str, object] = json.loads(last.removeprefix(b"data: ")) if last.startswith(b"data: {") else {}
    error = event.get("error")
    if error is None:
        return None
    return str((error.get("code") if isinstance(error, dict) else None) or "")
