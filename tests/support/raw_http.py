"""An HTTP server that answers with exactly the given bytes, for tests of clients."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """A whole HTTP/1.1 response with a true content length."""
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class RawServer:
    """The received requests, with separate head and body, and their connections."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/"


@asynccontextmanager
async def raw_server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[RawServer]:
    """Calls `handler(body, writer)` for every request; the handler writes any bytes. With `tls`, over TLS."""
    seen = RawServer(scheme="http" if tls is None else "https")
    tasks: set[asyncio.Task[None]] = set()

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                seen.heads.append(head)
                seen.bodies.append(body)
                await handler(body, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # last, since the server ends
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0, ssl=tls)
    seen.port = server.sockets[0].getsockname()[1]
    try:
        yield seen
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def message(body: bytes, form: bytes) -> str:
    """The text in `body` at the `%b` of `form`. Every other byte must be equal."""
    before, after = form.split(b"%b")
    assert body.startswith(before) and body.endswith(after), body
    text = body[len(before) : len(body) - len(after)]
    assert b'"' not in text, body
    return text.decode()
