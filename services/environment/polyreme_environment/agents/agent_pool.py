"""The episodes of a server whose environment is an agent, in place of an `EpisodePool`.

Invariant: each episode has a session of its own, which is open while the episode is played.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from polyreme.config.environment import EnvironmentConfig
from polyreme.experience.online import session_url
from polyreme_environment.agents.agent_episode import AgentEpisode
from polyreme_environment.agents.runners import Runner
from polyreme_environment.agents.session import SessionLimits
from polyreme_environment.agents.session_table import SessionTable
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import FullError


class AgentPool:
    """Agents and their sessions, in place of an `EpisodePool`.

    Args:
        sessions: the open ones of the server.
        rewarded: whether the run's rewards score the episodes.

    Attributes:
        server: http(s)://host:port of the session address.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        metrics: EnvironmentMetrics,
        runner: Runner,
        sessions: SessionTable,
        rewarded: bool = False,
    ) -> None:
        self._config, self._metrics, self._runner, self._rewarded = config, metrics, runner, rewarded
        self._sessions, self._playing = sessions, 0
        self.server, self.draining = "", False

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
        if self._playing >= self._config.episodes:
            raise FullError(f"{self._playing} of environment.episodes = {self._config.episodes} agents")
        limits = SessionLimits(self._config.max_message_chars, self._config.parallel_turns, self._config.tool_parser)
        self._playing += 1
        try:
            with self._sessions.opened(limits) as session, self._metrics.playing.track_inprogress():
                yield AgentEpisode(self._config, self._runner, session, session_url(self.server, session.id), self._rewarded)
        finally:
            self._playing -= 1
