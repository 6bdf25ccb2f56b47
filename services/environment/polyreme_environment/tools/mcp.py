"""The tools of an MCP server: the client's side of the Model Context Protocol, over standard input and output or streamable HTTP.

The wire is spoken here, since servers and the packages of a run want different versions of `mcp`. Only tools are used of it.

Invariant: a server that is lost is a LostError and is connected to again at its next use; a tool that fails is a ValueError,
which the policy sees; a call over HTTP that takes too long is a ContractError. Calls of several threads share the connection and
do not wait for each other. Calls block; the caller's deadline ends the process.
"""

import itertools
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

import httpx

from polyreme.errors import ConfigError
from polyreme.net.direct_http import UNCOMPRESSED
from polyreme_environment.contract import ContractError, LostError

_VERSION = "2025-06-18"
_BYTES = 16 << 20
_SECONDS = 30.0
_PAGES = 100
_CALL = "tools/call"
_REFUSED = (400, 422, 500)
"""Statuses of an error that may be a reply to its request. Others say something of the server or the session."""
_LOST = (OSError, ValueError, RecursionError, httpx.HTTPError)

Message = dict[str, Any]
Headers = dict[str, str]


class _Transport(Protocol):
    def tell(self, message: Message) -> None:
        """Sends a message that has no reply."""

    def ask(self, message: Message) -> Message:
        """The reply to a request."""

    def close(self) -> None: ...


class _Process:
    """A server that is a child of this process and speaks JSON lines. A thread gives each reply to its request."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lock, self._ended = threading.Lock(), False
        self._asked: dict[int, Future[Message]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, message: Message) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def ask(self, message: Message) -> Message:
        reply: Future[Message] = Future()
        with self._lock:
            if self._ended:
                raise ConnectionError("it ended")
            self._asked[message["id"]] = reply
        self.tell(message)
        return reply.result()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        why = f"it ended, or wrote a line of more than {_BYTES} bytes"
        try:
            while (line := self._process.stdout.readline(_BYTES)).endswith(b"\n"):
                message = json.loads(line)
                if "method" not in message and (reply := self._asked.pop(message.get("id"), None)) is not None:
                    reply.set_result(message)
        except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
            why = f"it wrote what is no message: {error}"
        with self._lock:
            self._ended = True
        for reply in self._asked.values():
            reply.set_exception(ConnectionError(why))


class _Http:
    """A server behind a URL, which answers with JSON or a stream of events, and to a call within `seconds`."""

    def __init__(self, url: str, seconds: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._url, self._client, self._headers = url, httpx.Client(limits=limits, trust_env=False), Headers()
        self._seconds = seconds

    def tell(self, message: Message) -> None:
        for _ in self._sent(message, _SECONDS):
            pass

    def ask(self, message: Message) -> Message:
        is_call = message["method"] == _CALL
        try:
            for reply in self._sent(message, self._seconds if is_call else _SECONDS):
                if not isinstance(reply, dict):
                    raise ValueError(f"expected an object; found {reply!r:.100}")
                if reply.get("id") == message["id"] and "method" not in reply:
                    return reply
        except httpx.ReadTimeout:
            if not is_call:
                raise
            tool = f"the tool {message['params']['name']:.100} of {self._url}"
            raise ContractError(
                f"expected {tool} to answer within 0.8 x step_timeout = {self._seconds:g} s; found none"
            ) from None
        raise ConnectionError(f"no reply to {message['method']}")

    def close(self) -> None:
        """Leaves it to the calls of other threads, which end with an error of their own if the server is lost."""

    def _sent(self, message: Message, seconds: float) -> Iterator[Message]:
        """What the server says to a message within some seconds."""
        headers = {"accept": "application/json, text/event-stream", **UNCOMPRESSED, **self._headers}
        timeout, deadline = httpx.Timeout(_SECONDS, read=seconds), time.monotonic() + seconds
        with self._client.stream("POST", self._url, json=message, headers=headers, timeout=timeout) as response:
            body = _body(response, deadline)
            if response.is_error:
                yield _refusal(response, body, message)
                return
            if session := response.headers.get("mcp-session-id", headers.get("mcp-session-id")):
                self._headers = {"mcp-protocol-version": _VERSION, "mcp-session-id": session}
            else:
                self._headers = {"mcp-protocol-version": _VERSION}
            if "id" not in message:
                return
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                for line in body:
                    if line.startswith(b"data:") and line[5:].strip():
                        yield json.loads(line[5:])
            else:
                yield json.loads(b"\n".join(body))


def _body(response: httpx.Response, deadline: float) -> Iterator[bytes]:
    """The lines of a body of at most _BYTES. At the deadline its connection ends. (A timeout of httpx is that of each part, and
    servers of MCP send comments while a tool runs.) Raises ValueError or an HTTPError."""
    connection = response.extensions["network_stream"].get_extra_info("socket")
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), connection.shutdown, [socket.SHUT_RDWR])
    size, rest = 0, b""
    timer.start()
    try:
        for part in response.iter_raw():
            if (size := size + len(part)) > _BYTES:
                raise ValueError(f"expected a reply of at most {_BYTES} bytes; found more")
            *lines, rest = (rest + part).split(b"\n")
            yield from lines
    except httpx.TransportError:
        if time.monotonic() < deadline:
            raise
    finally:
        timer.cancel()
    if time.monotonic() >= deadline:
        raise httpx.ReadTimeout("the reply takes too long")
    yield rest


def _refusal(response: httpx.Response, body: Iterator[bytes], message: Message) -> Message:
    """The error that answers a message, in a response with the status of an error. Raises HTTPStatusError when it has none."""
    reply: Message = {}
    with suppress(ValueError, RecursionError):
        reply = json.loads(b"\n".join(body))
    answers = isinstance(reply, dict) and "error" in reply and reply.get("id") == message.get("id", "none")
    if not answers or response.status_code not in _REFUSED:
        response.raise_for_status()
    return dict(reply)


class McpClient:
    """A connection to a server, which `config` (of McpServer) names. Connects at first use. `seconds`: of a call over HTTP."""

    def __init__(self, config: Mapping[str, Any], seconds: float) -> None:
        self._seconds = seconds
        self._config, self._numbers, self._connecting = config, itertools.count(1), threading.Lock()
        self._transport: _Transport | None = None
        self.name = config["url"] or " ".join(config["command"])

    def tools(self) -> dict[str, Callable[..., object]]:
        """The server's tools as methods, by name. Raises ConfigError when there are none."""
        found: list[Message] = []
        try:
            listed: Message = {}
            for _ in range(_PAGES):
                cursor = listed.get("nextCursor")
                listed = self._ask("tools/list", {"cursor": cursor} if cursor else {})
                found += listed["tools"]
                if not listed.get("nextCursor"):
                    break
            tools = {each["name"]: self._tool(each) for each in found}
        except (LostError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"an MCP server: {self.name}", str(error), "Fix environment.tools, or start the server.") from None
        if not tools:
            raise ConfigError(f"tools of the MCP server {self.name}", "none", "Fix environment.tools.")
        return tools

    def _tool(self, listed: Message) -> Callable[..., object]:
        name = listed["name"]

        def tool(self_: object, /, **arguments: Any) -> str:
            return self._call(name, arguments)

        parameters = listed.get("inputSchema") or {"type": "object", "properties": {}}
        function = {"name": name, "description": listed.get("description") or name, "parameters": parameters}
        tool.schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
        return tool

    def _call(self, name: str, arguments: Message) -> str:
        result = self._ask(_CALL, {"name": name, "arguments": arguments})
        text = "\n".join(str(part.get("text", f"({part.get('type')})")) for part in result.get("content", []))
        if result.get("isError"):
            raise ValueError(text)
        return text

    def _ask(self, method: str, parameters: Message) -> Message:
        """The result of a request. Raises ValueError for the server's own errors, and LostError."""
        transport: _Transport | None = None
        try:
            transport = self._connected()
            reply = transport.ask(self._request(method, parameters))
        except _LOST as error:
            if transport is not None:
                self._lose(transport)
            raise LostError(f"the MCP server {self.name}: {type(error).__name__}: {error}") from error
        if "error" in reply:
            raise ValueError(str(reply["error"].get("message")))
        return dict(reply["result"])

    def _connected(self) -> _Transport:
        with self._connecting:
            if self._transport is None:
                url, command = self._config["url"], self._config["command"]
                transport: _Transport = _Http(url, self._seconds) if url else _Process(command)
                about = {"name": "polyreme", "version": "1"}
                begin = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": about}
                try:
                    if "error" in (reply := transport.ask(self._request("initialize", begin))):
                        raise ConnectionError(f"it refuses: {reply['error']!r:.200}")
                    transport.tell({"jsonrpc": "2.0", "method": "notifications/initialized"})
                except _LOST:
                    transport.close()
                    raise
                self._transport = transport
            return self._transport

    def _lose(self, transport: _Transport) -> None:
        with self._connecting:
            if self._transport is transport:
                self._transport = None
        with suppress(OSError):
            transport.close()

    def _request(self, method: str, parameters: Message) -> Message:
        return {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": parameters}
