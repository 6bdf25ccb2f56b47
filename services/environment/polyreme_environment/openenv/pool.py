"""The episodes of a server whose environment is behind OpenEnv servers.

Invariant: an episode is one connection, and gets no step after its end. A server that is full is asked again later, for one more
connection at a time; one that is lost costs its running episodes a try.
"""

import asyncio
import hashlib
import json
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.isolation.processes import INVALID_MESSAGE
from polyreme_environment.contract import ContractError, Moved, ToolCall, tool_call
from polyreme_environment.contract import begun as begun_messages
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.openenv.mapping import (
    ActionForm,
    action_form,
    begun,
    observed,
    reset_fields,
    scored,
    tool_result,
    tool_schemas,
)
from polyreme_environment.openenv.wire import OpenEnvError, OpenEnvSocket, ServerLostError, action_schema, opened
from polyreme_environment.pool import EpisodeLostError, FullError, PlayError
from polyreme_environment.tool_calls import Calls, Malformed, find_calls
from polyreme_environment.toolbox import cut

logger = logging.getLogger(__name__)

_FULL_SECONDS, _LOST_SECONDS = 0.5, 5.0
"""Seconds after which a server that was full, or lost, is asked again."""
_SEED_BITS = (1 << 31) - 1


@dataclass(eq=False)
class _Server:
    """An OpenEnv server: the number of its connections, how many it takes (None: unknown), and when it may be asked for more."""

    url: str
    playing: int = 0
    room: int | None = None
    rests_until: float = 0.0
    is_lost: bool = False

    def takes(self, now: float) -> bool:
        """Whether it may be asked for another connection."""
        return now >= self.rests_until or (not self.is_lost and self.room is not None and self.playing < self.room)


class OpenEnvEpisode:
    """One environment. Its calls raise PlayError, EpisodeLostError or FullError."""

    def __init__(self, pool: "OpenEnvPool", stack: AsyncExitStack) -> None:
        self._pool, self._stack = pool, stack
        self._socket: OpenEnvSocket | None = None
        self._tools: list[dict[str, object]] = []
        self._is_rewarded = False

    async def reset(self, row: dict[str, object], seed: int) -> Moved:
        """Begins, on the server with the fewest episodes."""
        config, form = self._pool.config, self._pool.form
        async with self._pool.watched("reset"):
            asked = {"seed": seed & _SEED_BITS, **reset_fields(config.options, row)}
            self._socket, reply = await self._pool.begin(self._stack, asked)
            if form.has_tools:
                rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
                self._tools = tool_schemas(await self._socket.ask("mcp", rpc))
            first = begun_messages(begun(reply, config.observation), config.max_message_chars)
        return Moved(first, tools=self._tools)

    async def step(self, answer: pb.Answer) -> Moved:
        """Takes the policy's answer."""
        raw, parser = answer.raw or answer.text, self._pool.config.tool_parser
        async with self._pool.watched("step"):
            if self._tools and (calls := find_calls(raw, parser, in_thought=answer.in_thought)):
                return await self._call(calls)
            if (action := self._pool.form.action(answer.text)) is None:
                return Moved(done=True)
            try:
                return observed(await self._ask(action), self._pool.config.observation, self._pool.config.max_message_chars)
            except OpenEnvError as error:
                if error.code != "VALIDATION_ERROR":
                    raise
                return Moved([("user", cut(f"error: {error}", self._pool.config.max_message_chars))])

    async def _call(self, calls: Calls) -> Moved:
        """Makes the tool calls of an answer, until one ends the episode."""
        limit, reward, done = self._pool.config.max_message_chars // len(calls), 0.0, False
        answered: list[ToolCall] = []
        parts: dict[str, float] = {}
        for call in calls:
            began, name, result, error = time.monotonic(), "", "", ""
            if isinstance(call, Malformed):
                error = f"malformed call: {call.problem}"
            else:
                name = call.name
                reply = await self._ask({"type": "call_tool", "tool_name": name, "arguments": call.arguments})
                result, error = tool_result(reply)
                more, done, numbers = scored(reply)
                reward, parts = reward + more, parts | numbers
            shown = cut(f"error: {error}" if error else result, limit)
            answered.append(tool_call(name, call.text, shown, time.monotonic() - began, error, limit=limit))
            if done:
                break
        return Moved([] if done else [("tool", call[2]) for call in answered], reward, done, parts, answered)

    async def _ask(self, action: dict[str, object]) -> dict[str, object]:
        """A reply to a step. Raises ContractError for an episode that ends without ever having had a reward."""
        assert self._socket is not None
        reply = await self._socket.ask("step", action)
        self._is_rewarded = self._is_rewarded or reply.get("reward") is not None
        if reply.get("done") and not self._is_rewarded:
            raise ContractError("expected a reward until the end of an episode; found only null")
        return reply


class OpenEnvPool:
    """OpenEnv servers, in place of worker processes. `metrics` counts calls.

    Attributes:
        form: how answers become actions.
    """

    form: ActionForm

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self.config, self._metrics = config, metrics
        self._servers = [_Server(url) for url in config.openenv]
        self._episodes = 0
        self.draining, self._version = False, ""

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the environment."""
        return self._version, f"OpenEnv at {', '.join(server.url for server in self._servers)}"

    @property
    def available(self) -> bool:
        """Whether a server could be reached when it was last asked."""
        return not all(server.is_lost for server in self._servers)

    async def start(self) -> None:
        """Waits for the servers. Raises ConfigError unless actions are as declared, and UnavailableError after start_timeout."""
        schemas = await asyncio.gather(*(self._schema(server.url) for server in self._servers))
        forms = [action_form(self.config.action, schema) for schema in schemas]
        if any(form != forms[0] for form in forms):
            raise ConfigError("servers of one environment", "different actions", "Fix environment.openenv.")
        self.form = forms[0]
        self._version = f"openenv-{hashlib.sha256(json.dumps(schemas[0], sort_keys=True).encode()).hexdigest()[:12]}"

    async def close(self) -> None:
        """Refuses further episodes; each closes its own connection."""
        self.draining = True

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[OpenEnvEpisode]:
        """An episode, which gets its server when it begins. Raises FullError."""
        if self._episodes >= self.config.episodes:
            raise FullError(f"{self._episodes} of environment.episodes = {self.config.episodes}")
        self._episodes += 1
        try:
            async with AsyncExitStack() as stack:
                with self._metrics.playing.track_inprogress():
                    yield OpenEnvEpisode(self, stack)
        finally:
            self._episodes -= 1

    async def begin(self, stack: AsyncExitStack, data: dict[str, object]) -> tuple[OpenEnvSocket, dict[str, object]]:
        """A connection whose `reset` was answered, until the end of `stack`, and the answer.

        Raises:
            FullError: all servers that can be reached are full.
            EpisodeLostError: none can be reached.
            OpenEnvError: the environment failed.
        """
        while (server := self._choose(time.monotonic())) is not None:
            async with AsyncExitStack() as connection:
                try:
                    socket = await connection.enter_async_context(self._connected(server))
                    reply = await socket.ask("reset", data)
                except ServerLostError as error:
                    logger.warning("%s", error)
                    server.is_lost, server.rests_until = True, time.monotonic() + _LOST_SECONDS
                    continue
                except OpenEnvError as error:
                    if error.code != "CAPACITY_REACHED":
                        raise
                    server.is_lost, server.room = False, server.playing - 1
                    server.rests_until = time.monotonic() + _FULL_SECONDS * (0.5 + random.random())
                    continue
                server.is_lost = False
                stack.push_async_exit(connection.pop_all())
                return socket, reply
        if self.available:
            raise FullError(f"all OpenEnv servers are full: {[(each.url, each.room) for each in self._servers]}")
        raise EpisodeLostError(f"expected an OpenEnv server at {[each.url for each in self._servers]}; none can be reached")

    @asynccontextmanager
    async def watched(self, method: str) -> AsyncIterator[None]:
        """Bounds and times a call, and says what became of it."""
        try:
            with self._metrics.call_seconds.labels(method).time():
                async with asyncio.timeout(self.config.step_timeout):
                    yield
        except TimeoutError:
            seconds = f"{self.config.step_timeout:g} s"
            raise PlayError(f"expected {method} to return within environment.step_timeout = {seconds}; found none") from None
        except ServerLostError as error:
            raise EpisodeLostError(str(error)) from None
        except OpenEnvError as error:
            raise PlayError(f"{method}: {error.code}: {error}") from None
        except (ContractError, *INVALID_MESSAGE) as error:
            raise PlayError(f"{method}: {error or type(error).__name__}") from None

    def _choose(self, now: float) -> _Server | None:
        """The server with the fewest episodes among those that may be asked, for one more connection than it is known to take."""
        server = min((each for each in self._servers if each.takes(now)), key=lambda each: each.playing, default=None)
        if server is not None and server.room is not None and server.playing >= server.room:
            server.room, server.rests_until = server.playing + 1, now + _FULL_SECONDS
        return server

    @asynccontextmanager
    async def _connected(self, server: _Server) -> AsyncIterator[OpenEnvSocket]:
        server.playing += 1
        try:
            async with opened(server.url, self.config.max_message_chars) as socket:
                yield socket
        finally:
            server.playing -= 1

    async def _schema(self, url: str) -> dict[str, object]:
        deadline = time.monotonic() + self.config.start_timeout
        while True:
            try:
                return await action_schema(url, self.config.start_timeout)
            except ServerLostError as error:
                if time.monotonic() > deadline:
                    found, do = str(error), "Start it, or fix environment.openenv."
                    seconds = f"environment.start_timeout = {self.config.start_timeout:g} s"
                    raise UnavailableError(f"an OpenEnv server within {seconds}", found, do) from None
            await asyncio.sleep(_FULL_SECONDS)
