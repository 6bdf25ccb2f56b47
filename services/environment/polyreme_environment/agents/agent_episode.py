"""One run of an agent in a session.

Invariant: an episode ends with a reward that its agent gave, unless the run's rewards score it, or with an error. After a bound,
and the turns that are still sampled then, the agent has `step_timeout` seconds to give its reward. While turns are sampled, the
caller keeps the episode's time; else this module does.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.process.tasks import end_all
from polyreme_environment.agents.result import Result
from polyreme_environment.agents.runners import Runner
from polyreme_environment.agents.session import AgentSession, Asked, Withdrawn, agent_request
from polyreme_environment.pool import AgentMoved, PlayError

_NO_REWARD = (
    "expected a reward, which the agent returns or sends by POST BASE_URL/reward; found none. An agent must also give one when "
    "its requests are refused because of a bound (code episode_over)"
)


class AgentEpisode:
    """One run.

    Args:
        url: the session's address.
        rewarded: whether the run's rewards score the episode.
    """

    def __init__(
        self, config: EnvironmentConfig, runner: Runner, session: AgentSession, url: str, rewarded: bool = False
    ) -> None:
        self._config, self._runner, self._session, self._url = config, runner, session, url
        self._rewarded = rewarded
        self._deadline, self._idle_since = 0.0, 0.0

    async def play(self, row: dict[str, object], answers: AsyncIterator[pb.RunRequest]) -> AsyncGenerator[AgentMoved, None]:
        """Yields what the agent asks for, as it asks, and at last how it ended; nothing more when the answers end.

        Raises PlayError, EpisodeLostError or FullError.
        """
        self._idle_since = time.monotonic()
        self._deadline = self._idle_since + self._config.max_seconds
        run = asyncio.ensure_future(self._runner.run(row, self._url, self._session.key))
        reading = asyncio.ensure_future(self._read(answers))
        try:
            for task in (run, reading):
                task.add_done_callback(lambda _: self._session.wake())
            while not reading.done():
                left = None if self._session.sampling else self._deadline - time.monotonic()
                if run.done():
                    yield self._ended(run)
                    return
                if (found := self._session.take()) is not None:
                    yield AgentMoved(withdrawn=found.number) if isinstance(found, Withdrawn) else self._asked(found)
                elif left is None or left > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(left):
                            await self._session.changed()
                elif self._session.over:
                    yield self._ending_at_bound(f"it went on for {self._config.step_timeout:g} s after a bound")
                    return
                else:
                    self._session.end(f"the episode has reached environment.max_seconds = {self._config.max_seconds:g}")
                    self._deadline = time.monotonic() + self._config.step_timeout
            reading.result()
        finally:
            await end_all((run, reading))

    async def _read(self, answers: AsyncIterator[pb.RunRequest]) -> None:
        async for request in answers:
            if request.HasField("delta"):
                self._session.told(request.delta)
            else:
                self._take(request.answer)

    def _take(self, answer: pb.Answer) -> None:
        self._idle_since = time.monotonic()
        if answer.refused:
            self._session.refused(answer.number, answer.refused, over=answer.over)
        else:
            self._session.sampled(answer)
        self._deadline = self._idle_since + (self._config.step_timeout if self._session.over else answer.seconds_left)

    def _asked(self, asked: Asked) -> AgentMoved:
        idle = time.monotonic() - self._idle_since if self._session.sampling == 1 else 0.0
        return AgentMoved(rewards=self._session.take_rewards(), calls=asked.calls, agent=agent_request(asked), seconds=idle)

    def _ended(self, run: asyncio.Task[Result]) -> AgentMoved:
        if (error := run.exception()) is None:
            return self._ending(run.result(), "it returned none")
        if self._session.over and isinstance(error, PlayError):
            return self._ending_at_bound(str(error))
        raise error

    def _ending_at_bound(self, how: str) -> AgentMoved:
        if self._runner.ends_at_bounds:
            return AgentMoved(rewards=self._session.take_rewards(), done=True)
        return self._ending(Result(), how)

    def _ending(self, result: Result, how: str) -> AgentMoved:
        """`how`: how the agent ended, for the error where it has given no reward."""
        if result.reward is None and not self._session.is_rewarded and not self._rewarded:
            raise PlayError(f"{_NO_REWARD}: {how}")
        rewards = self._session.take_rewards()
        seconds = 0.0 if self._session.sampling else time.monotonic() - self._idle_since
        return AgentMoved(reward=result.reward or 0.0, done=True, parts=result.metrics, rewards=rewards, seconds=seconds)
