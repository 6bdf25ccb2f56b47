"""The episodes of an environment's class, in worker processes.

Invariant: the calls of an episode are made one after the other. An episode ends with one call of `close`, unless its process is
lost or another call of it does not end.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.process.tasks import end_all
from polyreme_environment.contract import Moved, understood
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import EpisodeLostError, FullError, PlayError
from polyreme_environment.tools.tool_class import sources_of
from polyreme_environment.worker_calls import EpisodeWorkers, StuckError, WorkerCalls

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 1.0
"""In which a coroutine that is cancelled must end."""
_CLOSE_SECONDS = 5.0
"""In which the last episodes may be closed when the server ends."""


class Episode:
    """One episode in a worker. Its calls raise PlayError or EpisodeLostError."""

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics, worker: WorkerCalls, number: int) -> None:
        self._config, self._metrics, self._worker, self._number = config, metrics, worker, number
        self._turn, self._is_stuck = asyncio.Lock(), False
        self._calls: set[asyncio.Task[Moved]] = set()

    async def reset(self, row: dict[str, object], seed: int) -> Moved:
        """Begins."""
        return await self._kept("reset", [row, seed])

    async def step(self, answer: pb.Answer) -> Moved:
        """Takes the policy's answer."""
        return await self._kept("step", [answer.text, answer.raw or answer.text, answer.in_thought])

    async def close(self) -> None:
        """Ends, after a call that is being made. Its worker forgets it."""
        try:
            await self._call("close", [])
        except (PlayError, EpisodeLostError) as error:
            logger.info("an episode ended badly: %s", error)
        finally:
            self._worker.leave()

    async def _kept(self, method: str, arguments: list[object]) -> Moved:
        """A caller that is cancelled leaves the call to its end."""
        self._calls.add(task := asyncio.create_task(self._call(method, arguments)))
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may have left
        return await asyncio.shield(task)

    async def _call(self, method: str, arguments: list[object]) -> Moved:
        message: Mapping[str, object] = {"episode": self._number, "method": method, "arguments": arguments}
        read = partial(understood, limit=self._config.max_message_chars)
        async with self._turn:
            if self._is_stuck:
                raise PlayError("another call of this episode goes on")
            with self._metrics.call_seconds.labels(method).time():
                try:
                    moved: Moved = await self._worker.call(method, message, self._config.step_timeout, read)
                except StuckError:
                    self._is_stuck = True
                    raise
        return moved


class EpisodePool:
    """Worker processes that have loaded an environment's class, and the episodes in them."""

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._workers = EpisodeWorkers("polyreme_environment.worker", config, metrics, config.worker_calls, _GRACE_SECONDS)
        self._numbers = itertools.count()
        self._playing = 0
        self._closing: set[asyncio.Task[None]] = set()
        self.draining = False

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the environment."""
        return self._workers.about

    @property
    def available(self) -> bool:
        """Whether a worker can play."""
        return bool(self._workers.usable)

    async def start(self) -> None:
        """Starts the workers. Raises ConfigError or UnavailableError when the environment cannot be loaded."""
        config = self._config
        setup = {"name": config.name, "max_chars": config.max_message_chars, "tool_parser": config.tool_parser}
        tools = {"tools": sources_of(config), "seconds": config.step_timeout, "threads": config.worker_calls > 1}
        await self._workers.start({**setup, **tools})

    async def close(self) -> None:
        """Ends all workers and the processes that they started."""
        self.draining = True
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_SECONDS)
        await end_all(self._closing)
        await self._workers.close()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An episode in the worker with the fewest. Raises FullError or EpisodeLostError."""
        if self._playing >= self._config.episodes:
            raise FullError(f"{self._playing} of environment.episodes = {self._config.episodes}")
        episode = Episode(self._config, self._metrics, self._workers.take(), next(self._numbers))
        self._playing += 1
        self._metrics.playing.inc()
        try:
            yield episode
        finally:
            self._playing -= 1
            self._metrics.playing.dec()
            self._closing.add(task := asyncio.create_task(episode.close()))
            task.add_done_callback(self._closing.discard)
