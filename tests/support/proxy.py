"""A bad network: a TCP proxy that loses answers on command, the way a dying connection does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Stands in front of a server. While `lose` is above 0, the next answers never arrive and their connections break."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.lose = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        forth = asyncio.create_task(self._copy(reader, server_writer))
        try:
            await self._answers(server_reader, writer)
        finally:
            forth.cancel()
            for end in (writer, server_writer):
                end.close()
            with suppress(asyncio.CancelledError):
                await forth
            self._tasks.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self.lose:  # the server has done it, and nobody will hear of it
                self.lose -= 1
                return
            writer.write(data)
            await writer.drain()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def bad_network(host: str, port: int) -> AsyncIterator[Proxy]:
    """A proxy on a free port (`proxy.port`) in front of `host:port`."""
    proxy = Proxy(host, port)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
