"""The environment servers of a run: it plays episodes over those with a lease.

Invariant: a server plays at most as many episodes of this client as its lease says. A server that is lost, or that refuses, costs
no episode its reward: the episode begins again elsewhere. What a server says is checked before it reaches a record.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from polyreme.api.v1 import environment_pb2
from polyreme.api.v1.experience_pb2 import OUTCOME_TIME
from polyreme.config.data import DataConfig
from polyreme.config.environment import EnvironmentConfig
from polyreme.dataset.chat import Message, read_tools, with_tools
from polyreme.dataset.columns import TokenIds
from polyreme.errors import UnavailableError
from polyreme.experience.leases import Lease
from polyreme.experience.run import Run
from polyreme.experience.shard import ONLY, Shard
from polyreme.net import rpc
from polyreme_trainer.data.prompts import prompt_in
from polyreme_trainer.data.tail import Tools
from polyreme_trainer.orchestrator.environment.agent_play import AgentPlay, NoEndingError
from polyreme_trainer.orchestrator.environment.episodes import Ending, HostLostError
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError, Task
from polyreme_trainer.orchestrator.environment.session import EpisodeOverError, EpisodeSession
from polyreme_trainer.orchestrator.environment.wire import EpisodeCall, EpisodeCalls, episode_calls, read_calls
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed
from polyreme_trainer.orchestrator.replicas.live_servers import LiveServers

logger = logging.getLogger(__name__)

_REST_SECONDS = 5.0
"""Seconds for which a server that failed gets no episode."""
_PAUSE_SECONDS = 0.5
"""Those of a server that plays on: it is full, or has lost a process, which is no reason to leave its others without work."""
_LOOK_SECONDS = 0.5
"""Seconds between two looks for a server while episodes wait for one, since the end of a rest has no event."""
_AGENT_SECONDS = 10.0
"""Seconds for a server to report the end of an agent that it has ended."""


@dataclass(eq=False)
class _EnvironmentServer:
    lease: Lease
    calls: EpisodeCalls
    playing: int = 0
    rests_until: float = 0.0

    def capacity(self, environment: str, shard: Shard) -> int:
        episodes = int(self.lease.facts["episodes"].get(environment, 0))
        return shard.share(episodes) if episodes else 0


class EnvironmentClient:
    """A host of the episodes of an environment: all environment servers with a lease.

    Args:
        run: provides the leases and receives the notices.
        config: `start_timeout` and `security` are used.
        data: says which columns of a row are its prompt, tools and label.
        seed: the run's seed.
        name: of the environment; "": the run's.
        shard: the orchestrator, which uses its share of what a lease says.
    """

    def __init__(
        self, run: Run, config: EnvironmentConfig, data: DataConfig, seed: int, name: str = "", shard: Shard = ONLY
    ) -> None:
        self._config, self._data, self._seed, self._name, self._shard = config, data, seed, name, shard
        # An agent gives its reward at its end, for which it has step_timeout seconds after a bound.
        self._grace = config.step_timeout + _AGENT_SECONDS if config.is_agent else 0.0
        self._leases = LiveServers(run, "environment")
        self._servers: dict[str, _EnvironmentServer] = {}
        self._waiting: deque[asyncio.Future[_EnvironmentServer]] = deque()  # one for each episode that waits for a server
        self._deadline = 0.0  # monotonic seconds at which they wait in vain, unless a server can be used until then
        self._looking: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def wait_ready(self) -> None:
        """Waits for a server. Raises UnavailableError after environment.start_timeout."""
        await self._leases.wait_for(1, self._config.start_timeout, "environment.start_timeout")

    async def refresh(self) -> None:
        """Updates the servers from the leases. Episodes on a server without a lease may still end there."""
        leases = await self._leases.live()
        for gone in self._servers.keys() - leases.keys():
            logger.warning("environment server %s left", gone)
            leaving = asyncio.create_task(self._servers.pop(gone).calls.close(self._config.max_seconds))
            self._closing.add(leaving)
            leaving.add_done_callback(self._closing.discard)
        for new in leases.keys() - self._servers.keys():
            calls = episode_calls(rpc.connect(leases[new].address, self._config.security))
            self._servers[new] = _EnvironmentServer(leases[new], calls)
            logger.info("environment server %s at %s joined", new, leases[new].address)
        self._grant()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for leaving in self._closing:
            leaving.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        for server in self._servers.values():
            await server.calls.close()
        self._servers.clear()

    async def play(self, task: Task, session: EpisodeSession) -> Ending:
        """See `Host`. A server that cannot be reached costs the episode no try for start_timeout: its lease outlives it."""
        deadline: float | None = None
        while True:
            async with self._claim() as server:
                try:
                    session.begin()
                    return await self._play(server, task, session)
                except grpc.aio.AioRpcError as error:
                    code, now = error.code(), time.monotonic()
                    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not session.turns:  # others play there too
                        server.rests_until = now + _PAUSE_SECONDS
                        continue
                    answer = f"answered {code.name}: {error.details()}"
                    self._rest(server, answer, _PAUSE_SECONDS if code is grpc.StatusCode.ABORTED else _REST_SECONDS)
                    if code is grpc.StatusCode.UNAVAILABLE and not session.turns:
                        deadline = deadline or now + self._config.start_timeout
                        if now < deadline:
                            continue
                    raise HostLostError(f"environment server {server.lease.id} {answer}") from error

    def _lost(self, server: _EnvironmentServer, how: str) -> HostLostError:
        self._rest(server, how, _REST_SECONDS)
        return HostLostError(f"environment server {server.lease.id} {how}")

    def _rest(self, server: _EnvironmentServer, how: str, seconds: float) -> None:
        """Gives a server no episode for some seconds."""
        now = time.monotonic()
        if server.rests_until <= now:  # else others of its episodes have just said it
            logger.warning("environment server %s %s", server.lease.id, how)
        server.rests_until = max(server.rests_until, now + seconds)

    async def _play(self, server: _EnvironmentServer, task: Task, session: EpisodeSession) -> Ending:
        call = server.calls.begin(environment_pb2.RunRequest(start=self._start(task, session)))
        try:
            if not self._config.is_agent:
                return await self._play_turns(call, server, task, session)
            try:
                return await AgentPlay(call, session, self._config.parallel_turns, self._grace).run()
            except NoEndingError as how:
                raise self._lost(server, str(how)) from None
        finally:
            call.cancel()

    async def _play_turns(self, call: EpisodeCall, server: _EnvironmentServer, task: Task, session: EpisodeSession) -> Ending:
        """Plays an episode whose turns follow each other."""
        spent = 0.0
        try:
            while True:
                async with asyncio.timeout_at(session.clock.deadline) as limit:
                    response = await call.read()
                if response is None:
                    raise self._lost(server, "ended an episode without its ending")
                if response.HasField("ending"):
                    if response.ending.error:
                        raise EpisodeError(f"the environment failed: {response.ending.error}")
                    spent += response.ending.seconds
                    end = response.ending
                    return Ending(session.outcome, end.reward, dict(end.parts), spent, read_calls(end))
                ask = response.ask
                spent += ask.seconds
                if session.turns:
                    session.reward(ask.reward, read_calls(ask))
                call.write(environment_pb2.RunRequest(answer=await self._answer(ask, task, session)))
        except TimeoutError:
            if not limit.expired():
                raise
            return Ending(OUTCOME_TIME, seconds=spent)
        except EpisodeOverError as over:
            return Ending(over.outcome, seconds=spent)

    async def _answer(self, ask: environment_pb2.Ask, task: Task, session: EpisodeSession) -> environment_pb2.Answer:
        if session.turns:
            messages = _new_messages(ask)
        else:
            session.tools, messages = self._begin(ask, task)
        turn = await session.answer(messages)
        raw, in_thought = "" if turn.raw == turn.text else turn.raw, session.opens_thought(turn.context)
        return environment_pb2.Answer(text=turn.text, raw=raw, in_thought=in_thought)

    def _start(self, task: Task, session: EpisodeSession) -> environment_pb2.Start:
        row = {**json.loads(task.prompt.metadata_json or "{}"), self._data.label_key: task.prompt.label}
        admission = task.admission
        seed = sequence_seed(self._seed, admission.index, admission.attempt, session.number, 0)
        return environment_pb2.Start(row_json=json.dumps(row), seed=seed, environment=self._name)

    def _begin(self, ask: environment_pb2.Ask, task: Task) -> tuple[Tools, list[Message]]:
        """The tools of an episode, with those of its row, and its first messages; none for the row's own prompt as it is."""
        messages: list[Message] = [{"role": message.role, "content": message.content} for message in ask.messages]
        tools = read_tools(ask.tools_json, "an environment")
        if tools is None:
            return None, messages
        row = json.loads(task.prompt.metadata_json or "{}")
        prompt = prompt_in(row, "the row of an episode", self._data)
        if isinstance(prompt, TokenIds):
            raise EpisodeError("expected a prompt of text or messages, for an environment with tools; found tokens")
        chat = with_tools(prompt, tools)
        return [*(chat.tools or ())], messages or [*chat.messages]

    @asynccontextmanager
    async def _claim(self) -> AsyncIterator[_EnvironmentServer]:
        """The server with most room, in order of arrival. Raises UnavailableError after start_timeout without any, even full."""
        waiter: asyncio.Future[_EnvironmentServer] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._deadline = time.monotonic() + self._config.start_timeout
        self._waiting.append(waiter)
        self._grant()
        try:
            yield await waiter
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().playing -= 1
                self._grant()

    def _grant(self) -> None:
        """Gives the servers' room to the waiting episodes. While some are left, it looks again after a moment."""
        now = time.monotonic()
        while self._waiting:
            if self._waiting[0].done():  # its episode was cancelled
                self._waiting.popleft()
                continue
            if (server := self._choose(now)) is None:
                break
            server.playing += 1
            self._waiting.popleft().set_result(server)
        if any(server.rests_until <= now for server in self._servers.values()):
            self._deadline = now + self._config.start_timeout  # they are only full
        elif now > self._deadline:
            self._refuse_waiting()
        if self._waiting and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        self._grant()

    def _refuse_waiting(self) -> None:
        found = ", ".join(filter(None, [*(f"{name} fails" for name in self._servers), self._leases.refused])) or "none"
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_exception(
                    UnavailableError(
                        f"an environment server within environment.start_timeout = {self._config.start_timeout:g} s",
                        found,
                        "See the environment service's log, or start one with `polyreme environment`.",
                    )
                )

    def _choose(self, now: float) -> _EnvironmentServer | None:
        rooms = {s: s.capacity(self._name, self._shard) for s in self._servers.values() if s.rests_until <= now}
        usable = [s for s, room in rooms.items() if s.playing < room]
        return min(usable, key=lambda s: (s.playing / rooms[s], s.lease.id), default=None)


def _new_messages(ask: environment_pb2.Ask) -> list[Message]:
    """What follows a turn. The first ones are the results of its tool calls."""
    if not ask.messages:
        raise EpisodeError("expected new messages after a turn; found none")
    messages: list[Message] = [{"role": message.role, "content": message.content} for message in ask.messages]
    for message, call in zip(messages, ask.calls, strict=False):
        if call.name:
            message["name"] = call.name
    return messages
