"""The tools of an MCP server: the client's side of the Model Context Protocol, over standard input and output, or streamable HTTP.

The wire is spoken here, since servers and the packages of a run want different versions of `mcp`. Only tools are used of it.

Invariant: a server that is lost is a LostError and is connected to again at its next use; a tool that fails is a ValueError, which the policy
sees. Calls block; the caller's deadline ends the process.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import httpx

from polyreme.errors import ConfigError
from polyreme_environment.contract import LostError

_VERSION = "2025-06-18"
_BYTES = 16 << 20
_SECONDS = 30.0
_PAGES = 100
_LOST = (OSError, ValueError, httpx.HTTPError)

Message = dict[str, Any]


class _Transport(Protocol):
    def send(self, message: Message) -> Iterator[Message]:
        """Sends a message. Yields what the server says until the caller has its answer."""

    def close(self) -> None: ...


class _Process:
    """A server that is a child of this process and speaks JSON lines."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, message: Message) -> Iterator[Message]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        while "id" in message:
            line = self._process.stdout.readline(_BYTES)
            if not line.endswith(b"\n"):
                raise ConnectionError(f"it ended, or wrote a line of more than {_BYTES} bytes")
            yield json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class _Http:
    """A server behind a URL, which answers with JSON or a stream of events."""

    def __init__(self, url: str) -> None:
        self._url, self._client, self._headers = url, httpx.Client(timeout=_SECONDS, trust_env=False), dict[str, str]()

    def send(self, message: Message) -> Iterator[Message]:
        headers = {"accept": "application/json, text/event-stream", **self._headers}
        with self._client.stream("POST", self._url, json=message, headers=headers) as response:
            response.raise_for_status()
            self._headers = {"mcp-protocol-version": _VERSION}
            if session := response.headers.get("mcp-session-id", headers.get("mcp-session-id")):
                self._headers["mcp-session-id"] = session
            if "id" not in message:
                return
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                for line in response.iter_lines():
                    if line.startswith("data:") and line[5:].strip():
                        yield json.loads(line[5:])
            else:
                yield json.loads(response.read())

    def close(self) -> None:
        self._client.close()


class McpClient:
    """A connection to a server, which `config` (of McpServer) names. Connects at its first use."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, self._number = config, 0
        self._transport: _Transport | None = None
        self.name = config["url"] or " ".join(config["command"])

    def tools(self) -> dict[str, Callable[..., Any]]:
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

    def _tool(self, listed: Message) -> Callable[..., Any]:
        name = listed["name"]

        def tool(self_: object, /, **arguments: Any) -> str:
            return self._call(name, arguments)

        parameters = listed.get("inputSchema") or {"type": "object", "properties": {}}
        function = {"name": name, "description": listed.get("description") or name, "parameters": parameters}
        tool.schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
        return tool

    def _call(self, name: str, arguments: Message) -> str:
        result = self._ask("tools/call", {"name": name, "arguments": arguments})
        text = "\n".join(str(part.get("text", f"({part.get('type')})")) for part in result.get("content", []))
        if result.get("isError"):
            raise ValueError(text)
        return text

    def _ask(self, method: str, parameters: Message) -> Message:
        """The result of a request. Raises ValueError for the server's own errors, and LostError."""
        try:
            if self._transport is None:
                self._transport = _Http(self._config["url"]) if self._config["url"] else _Process(self._config["command"])
                about = {"name": "polyreme", "version": "1"}
                self._reply("initialize", {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": about})
                for _ in self._transport.send({"jsonrpc": "2.0", "method": "notifications/initialized"}):
                    pass
            reply = self._reply(method, parameters)
        except _LOST as error:
            if self._transport is not None:
                with suppress(OSError):
                    self._transport.close()
            self._transport = None
            raise LostError(f"the MCP server {self.name}: {type(error).__name__}: {error}") from error
        if "error" in reply:
            raise ValueError(str(reply["error"].get("message")))
        return dict(reply["result"])

    def _reply(self, method: str, parameters: Message) -> Message:
        assert self._transport is not None
        self._number += 1
        request = {"jsonrpc": "2.0", "id": self._number, "method": method, "params": parameters}
        for message in self._transport.send(request):
            if message.get("id") == self._number and "method" not in message:
                return message
        raise ConnectionError(f"no reply to {method}")
