"""Bounds for the connections of an HTTP server, of clients that are slow, broken or hostile.

Invariant: a connection ends when a request does not arrive completely in time, when its head or its raw body is too large, or
when the client takes no more of an answer. When all of `connections` are open, a new one replaces the oldest one that has no
complete request, so clients that send nothing do not keep others out, and the process keeps file descriptors for its own work.
A connection that is made while the server ends is ended at once.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from polyreme.net.ports import affordable_connections

logger = logging.getLogger(__name__)

_Parser: Any = asyncio.Protocol if TYPE_CHECKING else object
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True)
class ConnectionLimits:
    """What one server grants its clients.

    Attributes:
        head_bytes: request line and headers.
        body_bytes: body as it is sent, with the framing of its chunks.
        head_seconds: for request line and headers, from the connection or the first byte on.
        body_seconds: for the whole body.
        write_seconds: for a client that takes nothing of an answer.
        connections: open at the same time; None: `affordable_connections`.
    """

    head_bytes: int = 64 << 10
    body_bytes: int = 256 << 20
    head_seconds: float = 30.0
    body_seconds: float = 300.0
    write_seconds: float = 300.0
    connections: int | None = None


def bounded_protocol(limits: ConnectionLimits, parser: Any = AutoHTTPProtocol) -> "type[BoundedProtocol]":
    """uvicorn's protocol `parser` (by default that of the installed parser) with `limits`, for one server."""
    most = limits.connections or affordable_connections()
    return cast("type[BoundedProtocol]", type("Bounded", (BoundedProtocol, parser), {"limits": limits, "most": most}))


class BoundedProtocol(_Parser):
    """The connections of one server, whose class they are.

    Attributes:
        is_ending: whether the server takes no connection any more.
    """

    limits: ConnectionLimits
    most: int
    is_ending = warned = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._began, self._received, self._timer, self._stalled = time.monotonic(), 0, None, None
        self._expect("head")
        if self.is_ending:
            self.end()
        elif len(self.connections) > self.most:
            if not type(self).warned:
                type(self).warned = True
                logger.warning(
                    "all %d connections of the HTTP server are open; each new one ends an idle one, or itself", self.most
                )
            waiting = (each for each in self.connections if each is not self and each.is_waiting)
            min(waiting, key=lambda each: each._began, default=self).end()

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has no complete request: an idle one, or one whose request is still arriving."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        before, arriving = self.cycle, self._stage
        self._received += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._expect(None)
        elif self.cycle is not None and self.cycle.more_body:
            if arriving != "body" or self.cycle is not before:
                self._expect("body", len(data))
        elif self.cycle is not before or arriving == "body":
            self._expect(None)
        elif arriving is None and self.cycle.response_complete:
            self._expect("head", len(data))
        self._check_size()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(self.limits.write_seconds, self.end)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stalled)
        self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        _cancel(self._stalled)
        self._stalled = None
        super().connection_lost(exc)

    def _expect(self, stage: str | None, received: int = 0) -> None:
        """Begins to wait for a `head` or a `body`, of which `received` bytes are here; None: the request is complete."""
        self._stage, self._received, self._began = stage, received, time.monotonic()
        _cancel(self._timer)
        self._timer = None
        if stage is not None:
            seconds = self.limits.head_seconds if stage == "head" else self.limits.body_seconds
            self._timer = self.loop.call_later(seconds, self.end)

    def _check_size(self) -> None:
        if self._stage == "head" and self._received > self.limits.head_bytes:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._stage == "body" and self._received > self.limits.body_bytes:
            self.end()

    def end(self) -> None:
        """Ends the connection at once."""
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
