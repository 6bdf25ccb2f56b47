"""The episodes of a server, and the worker processes that play them.

Invariant: every call of an episode has an outcome by its deadline, whatever user code does. A call that hangs, or that ends its worker, is an
error of its own episode; the other episodes of that worker are lost and may be played again.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme.isolation.processes import INVALID_MESSAGE, Worker, WorkerExitedError, Workers
from polyreme_environment.contract import ContractError, Moved, understood
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.tools.tool_class import sources_of

logger = logging.getLogger(__name__)


class FullError(Exception):
    """No further episode can be played at the moment."""


class EpisodeLostError(Exception):
    """What this episode needs was lost through no fault of it: its process, because of another one, or a server of tools."""


class PlayError(Exception):
    """The environment failed in this episode."""


class HostedEpisode(Protocol):
    """One episode on a server. Its calls raise PlayError, EpisodeLostError or FullError."""

    async def reset(self, row: dict[str, Any], seed: int) -> Moved:
        """Begins."""
        ...

    async def step(self, answer: pb.Answer) -> Moved:
        """Takes the policy's answer."""
        ...


class Pool(Protocol):
    """What plays the episodes of a server.

    Attributes:
        draining: that no further episode may begin.
    """

    draining: bool

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the environment."""
        ...

    @property
    def available(self) -> bool:
        """Whether an episode could be played."""
        ...

    async def start(self) -> None:
        """Raises ConfigError or UnavailableError when there is no environment."""

    async def close(self) -> None: ...

    def episode(self) -> AbstractAsyncContextManager[HostedEpisode]:
        """An episode, until the end of the block. Raises FullError."""
        ...


class _Slot:
    """The place of one worker process. Calls take turns."""

    def __init__(self, worker: Worker) -> None:
        self.worker: Worker | None = worker
        self.turn = asyncio.Lock()
        self.episodes = 0


class Episode:
    """One episode in a worker. Its calls raise PlayError or EpisodeLostError."""

    def __init__(self, pool: "EpisodePool", slot: _Slot, number: int) -> None:
        self._pool, self._slot, self._worker, self._number = pool, slot, slot.worker, number

    async def reset(self, row: dict[str, Any], seed: int) -> Moved:
        """Begins."""
        return await self._pool.call(self._slot, self._worker, {"episode": self._number, "reset": [row, seed]})

    async def step(self, answer: pb.Answer) -> Moved:
        """Takes the policy's answer."""
        told = [answer.text, answer.raw or answer.text]
        return await self._pool.call(self._slot, self._worker, {"episode": self._number, "step": told})

    async def close(self) -> None:
        """Ends. Its worker forgets it."""
        await self._pool.call(self._slot, self._worker, {"episode": self._number, "close": True})


async def start_workers(module: str, config: EnvironmentConfig, setup: Mapping[str, Any]) -> tuple[Workers, list[Worker]]:
    """Starts worker processes that run the environment's file.

    Args:
        module: whose `main(socket)` is a worker.
        setup: what its first message has beside the file, the options and the limit of memory.

    Raises:
        ConfigError: the file cannot be read or loaded.
        UnavailableError: loading takes longer than `start_timeout`.
    """
    try:
        code = "" if config.file is None else config.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a Python file {config.file}", str(error), "Fix environment.file. The service reads it on its own machine."
        ) from None
    where = "environment.tools" if config.file is None else str(config.file)
    file = {"path": where, "code": code, "options": config.options, "memory_mib": config.worker_memory_mib}
    workers = Workers(module, "environment", {**file, **setup}, (), config.start_timeout, config.worker_environment)
    try:
        return workers, await workers.spawn_all(config.workers)
    except BaseException:
        workers.close()
        raise


class EpisodePool:
    """Worker processes that have loaded an environment. `metrics` counts calls and replaced workers."""

    def __init__(self, config: EnvironmentConfig, metrics: EnvironmentMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._workers: Workers | None = None
        self._slots: list[_Slot] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.draining = False

    @property
    def _processes(self) -> Workers:
        assert self._workers is not None, "`start` comes first"
        return self._workers

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of the environment."""
        return self._processes.facts[0][:2]

    @property
    def available(self) -> bool:
        """Whether a worker can play."""
        return any(slot.worker is not None for slot in self._slots)

    async def start(self) -> None:
        """Starts the workers. Raises ConfigError or UnavailableError when the environment cannot be loaded."""
        config = self._config
        setup = {"name": config.name, "max_chars": config.max_message_chars, "tool_parser": config.tool_parser}
        tools = {"tools": sources_of(config), "seconds": config.step_timeout}
        self._workers, first = await start_workers("polyreme_environment.worker", config, {**setup, **tools})
        self._slots = [_Slot(worker) for worker in first]

    async def close(self) -> None:
        """Ends all workers and the processes that they started."""
        self.draining = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._workers is not None:
            self._workers.close()

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """An episode in the worker with the fewest. Raises FullError."""
        playing = sum(slot.episodes for slot in self._slots)
        usable = [slot for slot in self._slots if slot.worker is not None]
        if playing >= self._config.episodes or not usable:
            raise FullError(f"{playing} of environment.episodes = {self._config.episodes} in {len(usable)} worker processes")
        slot = min(usable, key=lambda slot: slot.episodes)
        slot.episodes += 1
        self._metrics.playing.inc()
        episode = Episode(self, slot, next(self._numbers))
        try:
            yield episode
        finally:
            slot.episodes -= 1
            self._metrics.playing.dec()
            if not self.draining:
                self._keep(self._forget(episode))

    async def call(self, slot: _Slot, worker: Worker | None, call: dict[str, Any]) -> Moved:
        """The reply of a worker. A caller that is cancelled leaves the call to its end, so that replies stay in order."""
        return await asyncio.shield(self._keep(self._call(slot, worker, call)))

    async def _forget(self, episode: Episode) -> None:
        try:
            await episode.close()
        except (PlayError, EpisodeLostError) as error:
            logger.info("an episode ended badly: %s", error)

    async def _call(self, slot: _Slot, worker: Worker | None, call: dict[str, Any]) -> Moved:
        method = next(name for name in ("reset", "step", "close") if name in call)
        async with slot.turn:
            if worker is None or slot.worker is not worker:
                raise EpisodeLostError(
                    "the worker process of this episode was replaced, because of another episode or from outside"
                )
            number = next(self._numbers)
            with self._metrics.call_seconds.labels(method).time():
                try:
                    await worker.send({"number": number, **call})
                    async with asyncio.timeout(self._config.step_timeout):
                        reply = await worker.receive()
                    if reply["number"] != number:
                        raise ValueError(f"reply {reply['number']} to call {number}")
                    answer = None if reply.keys() & {"error", "lost"} else understood(reply, self._config.max_message_chars)
                except TimeoutError:
                    found, reason = f"within environment.step_timeout = {self._config.step_timeout:g} s; found none", "timeout"
                    error = PlayError(f"expected {method} to return {found}, so its process was killed")
                except WorkerExitedError as gone:
                    error, reason = PlayError(f"the worker process {gone} in {method}"), "exit"
                except (ContractError, *INVALID_MESSAGE) as bad:
                    error, reason = PlayError(f"the worker's reply is invalid: {bad}"), "reply"
                else:
                    if printed := reply.pop("printed", ""):
                        logger.info("%s printed: %s", method, printed)
                    if "lost" in reply:
                        raise EpisodeLostError(str(reply["lost"]))
                    if answer is None:
                        raise PlayError(f"{method}: {reply['error']}")
                    return answer
            self._metrics.workers_replaced.labels(reason).inc()
            self._processes.discard(worker)
            slot.worker = None
            self._keep(self._replace(slot))
            raise error

    async def _replace(self, slot: _Slot) -> None:
        slot.worker = await self._processes.respawn(lambda reason: None)

    def _keep(self, work: Any) -> "asyncio.Task[Any]":
        """A task that is kept until it ends; its failure may go unseen."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def ended(task: "asyncio.Task[Any]") -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it

        task.add_done_callback(ended)
        return task
