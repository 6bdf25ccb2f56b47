"""A bad network: a TCP proxy that loses answers, delays everything, or breaks connections, on command."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

CHUNK = 1 << 16


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def at_port(url: str, port: int) -> str:
    """The URL of the same server, with the same login, at another port of 127.0.0.1."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{port}").geturl()


class Proxy:
    """A proxy in front of a server.

    Attributes:
        lose: number of next answers that are lost with their connections.
        listener: awaited with a client's bytes before they are forwarded; answer_listener: with the server's.
        port: its port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.lose = 0
        self.listener: Callable[[bytes], Awaitable[None]] | None = None
        self.answer_listener: Callable[[bytes], Awaitable[None]] | None = None
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False

    def hold(self) -> None:
        """Holds all bytes back in both directions until `heal`, after which they arrive."""
        self._flows.clear()

    def refuse(self) -> None:
        """Breaks all connections, including new ones, until `heal`."""
        self._refuses = True
        for task in self._tasks:
            task.cancel()

    def lead_to(self, host: str, port: int) -> None:
        """Leads new connections to another server, and breaks the others."""
        if self._target != (host, port):
            self._target = (host, port)
            for task in self._tasks:
                task.cancel()

    def refuse_after(self, nbytes: int) -> None:
        """`refuse` once the clients have sent `nbytes` more. They are counted, not the reads they come in: on a busy machine
        one read may hold all that was sent. The read that reaches the number is lost."""
        self.listener = self._refusal(nbytes)

    def refuse_after_answers(self, nbytes: int) -> None:
        """The same for bytes that the server has sent."""
        self.answer_listener = self._refusal(nbytes)

    def _refusal(self, nbytes: int) -> Callable[[bytes], Awaitable[None]]:
        left = nbytes

        async def count(data: bytes) -> None:
            nonlocal left
            if left > 0:
                left -= len(data)
                if left <= 0:
                    self.refuse()

        return count

    def heal(self) -> None:
        self._refuses = False
        self._flows.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.CancelledError):
                if not self._refuses:
                    await self._connect(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        forth = asyncio.create_task(self._requests(reader, server_writer))
        try:
            await self._answers(server_reader, writer)
        finally:
            try:
                if self._flows.is_set():
                    forth.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await forth  # held bytes arrive, although no client waits for the answer
            finally:
                server_writer.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self.listener is not None:
                await self.listener(data)
            await self._flows.wait()
            if self._refuses:
                return  # a listener's `refuse` takes effect only at the next wait, and this read may hold all that was sent
            writer.write(data)
            await writer.drain()
        await self._flows.wait()
        writer.write_eof()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if self.lose:  # the server has executed it, but the answer is lost
                self.lose -= 1
                return
            if self.answer_listener is not None:
                await self.answer_listener(data)
            await self._flows.wait()
            if self._refuses:
                return
            writer.write(data)
            await writer.drain()

    async def close(self) -> None:
        self.heal()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def bad_network(host: str, port: int, address: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy on a free port of `address` (`proxy.port`) in front of `host:port`."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.handle, address, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
