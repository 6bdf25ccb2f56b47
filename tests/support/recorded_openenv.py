"""An OpenEnv server that answers as a real one did, for machines that cannot install the package.

A recording has the server's `/schema`, and conversations: lists of [what was sent, what was answered].
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

FILE = Path(__file__).resolve().parents[1] / "contract" / "recordings" / "openenv.json"
FULL = {"message": "Server at capacity: 1/1 sessions active", "code": "CAPACITY_REACHED", "active_sessions": 1, "max_sessions": 1}


def recorded(name: str) -> dict[str, Any]:
    """The recording of a server."""
    recording: dict[str, Any] = json.loads(FILE.read_text())[name]
    return recording


async def record(url: str, sent: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """A recording of the server at `url`, with these conversations."""
    async with httpx.AsyncClient(trust_env=False) as http:
        schema = (await http.get(f"{url}/schema")).json()
    conversations = []
    for messages in sent:
        async with connect(f"ws{url.removeprefix('http')}/ws", proxy=None) as socket:
            exchanges = []
            for message in messages:
                await socket.send(json.dumps(message))
                exchanges.append([message, json.loads(await asyncio.wait_for(socket.recv(), 60))])
            conversations.append(exchanges)
    return {"schema": schema, "conversations": conversations}


class RecordedServer:
    """The server. `capacity`: its number of connections; `active`: those that are open; `ended`: those that were ended by `close`; `hangs`: set
    to an event, it answers only after that; `replace`: a text of its answers, and the other one that stands there; `says`: its next answers
    instead, None: it closes the connection."""

    def __init__(self, recording: dict[str, Any], capacity: int) -> None:
        self._recording, self.capacity = recording, capacity
        self.active = self.ended = 0
        self.url = ""
        self.hangs: asyncio.Event | None = None
        self.replace = ("", "")
        self.says: list[str | None] = []
        self.server: Server | None = None

    async def stop(self) -> None:
        """Closes all connections, as a server that dies."""
        assert self.server is not None
        self.server.close()
        await self.server.wait_closed()

    async def answer(self, socket: ServerConnection) -> None:
        """One connection."""
        if self.active >= self.capacity:
            await socket.send(json.dumps({"type": "error", "data": FULL}))
            return
        self.active += 1
        history: list[Any] = []
        try:
            async for text in socket:
                history.append(json.loads(text))
                if history[-1] == {"type": "close"}:
                    self.ended += 1
                    return
                if self.hangs is not None:
                    await self.hangs.wait()
                said = self.says.pop(0) if self.says else json.dumps(self._reply(history)).replace(*self.replace)
                if said is None:
                    return
                await socket.send(said)
        finally:
            self.active -= 1

    def _reply(self, history: list[Any]) -> Any:
        for exchanges in self._recording["conversations"]:
            if [sent for sent, _ in exchanges[: len(history)]] == history:
                return exchanges[len(history) - 1][1]
        raise AssertionError(f"not in the recording: {history}")

    def schema(self, socket: ServerConnection, request: Request) -> Response | None:
        """The answer to GET /schema."""
        return None if request.path == "/ws" else socket.respond(HTTPStatus.OK, json.dumps(self._recording["schema"]))


@asynccontextmanager
async def replayed(name: str, capacity: int = 8) -> AsyncIterator[RecordedServer]:
    """A server with a recording, until the end of the block."""
    replay = RecordedServer(recorded(name), capacity)
    async with serve(replay.answer, "127.0.0.1", 0, process_request=replay.schema) as server:
        replay.server = server
        replay.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield replay
