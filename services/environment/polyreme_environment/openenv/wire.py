"""One connection to an OpenEnv server (0.10), which is one environment.

Invariant: each request has one reply or an error, within the caller's deadline. The HTTP routes `/reset` and `/step` are never
used: they make a new environment for each call.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from polyreme_environment.contract import Reply, valid_text

_PING_SECONDS = 20.0
_CLOSE_SECONDS = 2.0
_FRAME_OVERHEAD = 1 << 20
_REPLIES = {"reset": "observation", "step": "observation", "mcp": "mcp"}
_SHOWN = 300


class ServerLostError(Exception):
    """The server cannot be reached, or has closed the connection."""


class OpenEnvError(Exception):
    """The server answered with an error. `code` is its code, such as VALIDATION_ERROR."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OpenEnvSocket:
    """A connection. Its requests are made one after the other."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket

    async def ask(self, kind: str, data: dict[str, object]) -> dict[str, object]:
        """The data of the reply to a request of type `kind`: reset, step or mcp. Raises ServerLostError or OpenEnvError."""
        with suppress(ConnectionClosed):  # a full server says so before it closes, which is read below
            await self._socket.send(json.dumps({"type": kind, "data": data}))
        try:
            reply = json.loads(await self._socket.recv())
            type_, body = reply["type"], reply["data"]
        except ConnectionClosed as closed:
            raise ServerLostError(f"the server closed the connection: {closed}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OpenEnvError("INVALID_REPLY", f"expected a JSON object with type and data; found {error!r:.{_SHOWN}}") from None
        if not isinstance(body, dict) or type_ not in ("error", _REPLIES[kind]):
            raise OpenEnvError("INVALID_REPLY", f"expected {_REPLIES[kind]!r} in reply to {kind}; found {type_!r:.{_SHOWN}}")
        if type_ == "error":
            raise OpenEnvError(str(body.get("code")), _described(body))
        return body


def _described(body: Reply) -> str:
    """What an error says. One of validation has its reasons apart."""
    reasons = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in body.get("errors") or ()]
    return valid_text("; ".join(reasons) or str(body.get("message")))


@asynccontextmanager
async def opened(url: str, max_chars: int) -> AsyncIterator[OpenEnvSocket]:
    """A connection with keep-alives to a server `http(s)://host:port`, until the end of the block.

    A server that is busy in a long step need not answer them: the caller has the deadline.

    Raises:
        ServerLostError: it cannot be reached.
    """
    address = f"ws{url.rstrip('/').removeprefix('http')}/ws"
    limit = 4 * max_chars + _FRAME_OVERHEAD
    try:
        socket = await connect(
            address, proxy=None, max_size=limit, ping_interval=_PING_SECONDS, ping_timeout=None, close_timeout=_CLOSE_SECONDS
        )
    except (OSError, TimeoutError, InvalidHandshake) as error:
        raise ServerLostError(f"{url} cannot be reached: {error or type(error).__name__}") from None
    try:
        yield OpenEnvSocket(socket)
    finally:
        # The server ends the environment before it closes. Who only closes the connection may find the server still full.
        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await socket.send(json.dumps({"type": "close"}))
                await socket.wait_closed()
        await socket.close()


async def action_schema(url: str, seconds: float) -> dict[str, object]:
    """The JSON schema of the actions of a server. Raises ServerLostError."""
    try:
        async with httpx.AsyncClient(timeout=seconds, trust_env=False) as http:
            reply = await http.get(f"{url.rstrip('/')}/schema")
            reply.raise_for_status()
            schema = reply.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerLostError(f"{url}/schema: {error or type(error).__name__}") from None
    return dict(schema)
