"""The episodes of a server whose environment is an agent.

Invariant: an episode ends with a reward that its agent gave, unless the run's rewards score it, or with an error. After a bound the agent still has `step_timeout` seconds to give
its reward, so an episode ends at the latest that long after `max_seconds`.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme_environment.agents.address import base_url
from polyreme_environment.agents.result import Result
from polyreme_environment.agents.runners import Runner
from polyreme_environment.agents.session import AgentSession, Asked, SessionTable
from polyreme_environment.contract import Moved
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import FullError, PlayError

_NO_REWARD = (
    "expected a reward, which the agent returns or sends by POST BASE_URL/reward; found none. An agent must also give one when its requests "
    "are refused because of a bound (code episode_over)"
)


@dataclass(frozen=True)
class AgentMoved(Moved):
    """A request of an agent, in place of messages."""

    agent: pb.AgentRequest = field(default_factory=pb.AgentRequest)


class AgentEpisode:
    """One run of an agent in a session. Its calls raise PlayError or EpisodeLostError."""

    def __init__(
        self, config: EnvironmentConfig, runner: Runner, session: AgentSession, url: str, rewarded: bool = False
    ) -> None:
        self._config, self._runner, self._session, self._url = config, runner, session, url
        self._rewarded = rewarded
        self._run: asyncio.Task[Result] | None = None
        self._deadline = 0.0

    async def reset(self, row: dict[str, Any], seed: int) -> Moved:
        """Starts the agent. Returns what it asks for, or how it ended. `seed` is not the agent's to know."""
        self._deadline = time.monotonic() + self._config.max_seconds
        self._run = asyncio.create_task(self._runner.run(row, self._url, self._session.key))
        return await self._next(self._run)

    async def step(self, answer: pb.Answer) -> Moved:
        """Gives the agent its answer. Returns as `reset`."""
        if answer.refused:
            self._session.refused(answer.refused, over=answer.over)
            if answer.over:
                self._deadline = min(self._deadline, time.monotonic() + self._config.step_timeout)
        else:
            self._session.sampled(answer)
        assert self._run is not None
        return await self._next(self._run)

    async def close(self) -> None:
        """Ends the agent."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _next(self, run: asyncio.Task[Result]) -> Moved:
        asking = asyncio.ensure_future(self._session.next())
        try:
            while True:
                left = max(0.0, self._deadline - time.monotonic())
                await asyncio.wait({asking, run}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if run.done():
                    return self._ended(run)
                if asking.done():
                    return self._asked(asking.result())
                if time.monotonic() < self._deadline:
                    continue
                if self._session.over:
                    return self._ending(Result(), f"it went on for {self._config.step_timeout:g} s after a bound")
                self._session.end(f"the episode has reached environment.max_seconds = {self._config.max_seconds:g}")
                self._deadline += self._config.step_timeout
        finally:
            asking.cancel()

    def _asked(self, asked: Asked) -> AgentMoved:
        request = asked.request
        agent = pb.AgentRequest(
            messages_json=json.dumps(asked.messages) if asked.messages else "",
            tools_json=json.dumps(request.tools) if request.tools else "",
            after=asked.after,
            max_tokens=request.max_tokens or 0,
            temperature=request.temperature,
            prompt=asked.text,
            context_ids=request.prompt if isinstance(request.prompt, tuple) else (),
            stop=request.stop,
            wants_tokens=request.wants_tokens,
        )
        return AgentMoved(reward=self._session.take_reward(), calls=asked.calls, agent=agent)

    def _ended(self, run: asyncio.Task[Result]) -> Moved:
        if (error := run.exception()) is None:
            return self._ending(run.result(), "it returned none")
        if self._session.over and isinstance(error, PlayError):
            if self._runner.ends_at_bounds:
                return Moved(reward=self._session.take_reward(), done=True)
            return self._ending(Result(), str(error))
        raise error

    def _ending(self, result: Result, how: str) -> Moved:
        """`how`: how the agent ended, for the error where it has given no reward."""
        if result.reward is None and not self._session.is_rewarded and not self._rewarded:
            raise PlayError(f"{_NO_REWARD}: {how}")
        reward = (result.reward or 0.0) + self._session.take_reward()
        return Moved(reward=reward, done=True, parts=result.metrics)


class AgentPool:
    """Agents and their sessions, in place of an `EpisodePool`.

    Args:
        rewarded: whether the run's rewards score the episodes.

    Attributes:
        sessions: those that are open.
        server: http(s)://host:port of the session address.
    """

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics, runner: Runner, rewarded: bool = False) -> None:
        self._config, self._metrics, self._runner, self._rewarded = config, metrics, runner, rewarded
        self.sessions, self.server, self.draining = SessionTable(), "", False

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the agent."""
        return self._runner.about

    @property
    def available(self) -> bool:
        """Whether an agent can run."""
        return self._runner.available

    async def start(self) -> None:
        """Raises ConfigError or UnavailableError when there is no agent."""
        await self._runner.start(self.server)

    async def close(self) -> None:
        """Ends all agents."""
        self.draining = True
        await self._runner.close()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[AgentEpisode]:
        """An episode with a session of its own. Raises FullError."""
        if len(self.sessions) >= self._config.episodes or not self.available:
            raise FullError(f"{len(self.sessions)} of environment.episodes = {self._config.episodes} agents")
        limits = self._config.max_message_chars, self._config.tool_parser
        with self.sessions.opened(*limits) as session, self._metrics.playing.track_inprogress():
            episode = AgentEpisode(self._config, self._runner, session, base_url(self.server, session), self._rewarded)
            try:
                yield episode
            finally:
                await episode.close()
