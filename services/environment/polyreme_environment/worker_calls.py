"""Worker processes that make the calls of many episodes at once, and are replaced when they end.

Invariant: every call has an outcome by its deadline, whatever user code does. An endless call is cancelled. Where that fails, its
process takes no more episodes and ends with the last one; a wholly blocked process is killed, and its other calls are lost.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from polyreme.config.environment import EnvironmentConfig
from polyreme.config.python_source import read_source
from polyreme.isolation.processes import INVALID_MESSAGE, Worker, WorkerExitedError, Workers
from polyreme.process.tasks import end_all
from polyreme_environment.contract import ContractError, Reply
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.pool import EpisodeLostError, FullError, PlayError, ToolLostError, WorkerLostError

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 4.0
"""A process that has not said for so long that it could not cancel a call is blocked."""
_STUCK: Mapping[str, object] = {}
"""In place of the reply to a call that cannot be cancelled."""
_NO_CALL = -1
"""At fault where something else killed the process."""
T = TypeVar("T")


class StuckError(PlayError):
    """A call cannot be ended."""


class WorkerCalls:
    """The calls in one worker process.

    Args:
        limit: calls at once; further ones wait.
        grace: seconds in which a cancelled call must end.
        discard: ends the process.

    Attributes:
        episodes: the number of its episodes.
        left: set once it takes no further ones, for `reason`.
    """

    def __init__(self, worker: Worker, limit: int, grace: float, discard: Callable[[Worker], None]) -> None:
        self.episodes, self.left, self.reason = 0, asyncio.Event(), ""
        self._worker, self._grace, self._discard = worker, grace, discard
        self._room = asyncio.Semaphore(limit)
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._inside: int | None = None
        self._ended = ""
        self._cancelling: set[asyncio.Task[None]] = set()

    async def call(self, what: str, message: Mapping[str, object], seconds: float | None, read: Callable[[Reply], T]) -> T:
        """Makes a call. A caller that is cancelled cancels it.

        Args:
            what: is called, for messages.
            seconds: its deadline, from when there is room for it.
            read: what a reply stands for. Raises ContractError, or what reading another form raises.

        Raises:
            PlayError: it failed, or had no reply in time; StuckError: and goes on.
            EpisodeLostError: its process ended, through no fault of this call that is known.
        """
        async with self._room:
            if self._ended:
                raise WorkerLostError(self._ended)
            number = next(self._numbers)
            answer = self._calls[number] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its caller may have left
            try:
                async with asyncio.timeout(seconds):
                    await self._worker.send({"number": number, **message})
                    reply = await asyncio.shield(answer)
            except TimeoutError:
                await self._cancel(number, answer)
                if isinstance(lost := answer.exception(), EpisodeLostError):
                    raise lost from None
                error = f"expected {what} to return within environment.step_timeout = {seconds:g} s; found none"
                raise StuckError(error) if answer.exception() or answer.result() is _STUCK else PlayError(error) from None
            except asyncio.CancelledError:
                self._cancelling.add(task := asyncio.create_task(self._cancel(number, answer)))
                task.add_done_callback(self._cancelling.discard)
                raise
        if "lost" in reply:
            raise ToolLostError(str(reply["lost"]))
        if "error" in reply:
            raise PlayError(f"{what}: {reply['error']}")
        try:
            return read(reply)
        except (ContractError, *INVALID_MESSAGE) as bad:
            error = f"the worker's reply is invalid: {bad}"
            self.end(error, "reply")
            raise PlayError(error) from None

    async def read(self) -> None:
        """Gives each reply to its call, until the process ends or breaks the protocol: user code in it could write what comes."""
        try:
            while True:
                reply = await self._worker.receive()
                if "inside" in reply:
                    self._inside = reply["inside"]
                elif "stuck" in reply:
                    self._answer(self._calls[reply["stuck"]], _STUCK)
                else:
                    if printed := reply.pop("printed", ""):
                        logger.info("printed: %s", printed)
                    self._answer(self._calls.pop(reply.pop("number")), reply)
        except WorkerExitedError as gone:
            self.end(f"the worker process {gone}", "exit", _NO_CALL if gone.killed else None)
        except INVALID_MESSAGE as bad:
            self.end(f"the worker's reply is invalid: {bad}", "reply")

    def leave(self) -> None:
        """An episode has ended."""
        self.episodes -= 1
        if self.left.is_set() and not self.episodes:
            self.end("its last episode has ended", self.reason)

    def end(self, why: str, reason: str, at_fault: int | None = None) -> None:
        """Ends the process. The call `at_fault` has failed; None: the only one. The other calls are lost; all with `_NO_CALL`."""
        if self._ended:
            return
        self._ended = f"{why}, because of this episode, of another one or from outside"
        calls, self._calls = {number: call for number, call in self._calls.items() if not call.done()}, {}
        if at_fault is None and len(calls) == 1:
            (at_fault,) = calls
        for number, call in calls.items():
            call.set_exception(PlayError(why) if number == at_fault else WorkerLostError(self._ended))
        self._retire(reason)
        self._discard(self._worker)

    def _retire(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.left.set()

    def _answer(self, call: "asyncio.Future[Reply]", reply: Reply) -> None:
        if not call.done():
            call.set_result(reply)

    async def _cancel(self, number: int, answer: "asyncio.Future[Reply]") -> None:
        self._inside = None
        try:
            async with asyncio.timeout(self._grace + _ANSWER_SECONDS):
                await self._worker.send({"number": number, "cancel": self._grace})
                await asyncio.wait({answer})
        except TimeoutError:
            if self._ended:
                return
            inside = self._inside if self._inside in self._calls else number
            logger.warning("a call blocked its worker process, which is killed with the %d calls in it", len(self._calls))
            self.end("expected the other calls of a process to go on during this one; found it blocked", "timeout", inside)
            return
        if not answer.exception() and answer.result() is _STUCK:
            logger.warning("a call does not end; its worker process takes no further episodes and ends after %d", self.episodes)
            self._retire("timeout")
            if not self.episodes:
                self.end("a call did not end", "timeout")


class EpisodeWorkers:
    """The worker processes of a server, at `config.workers` places.

    Args:
        module: whose `main(socket)` is a worker.
        limit, grace: see WorkerCalls.
    """

    def __init__(self, module: str, config: EnvironmentConfig, metrics: EnvironmentMetrics, limit: int, grace: float) -> None:
        self._module, self._config, self._metrics = module, config, metrics
        self._limit, self._grace = limit, grace
        self._workers: Workers | None = None
        self._places: list[WorkerCalls | None] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _processes(self) -> Workers:
        assert self._workers is not None, "`start` comes first"
        return self._workers

    @property
    def about(self) -> tuple[str, str]:
        """Version and description of what was loaded."""
        return self._processes.facts[0][:2]

    @property
    def usable(self) -> list[WorkerCalls]:
        """The processes that take episodes."""
        return [place for place in self._places if place is not None]

    async def start(self, setup: Mapping[str, object]) -> None:
        """Starts the processes.

        Args:
            setup: what their first message has beside the file, the options and the limit of memory.

        Raises:
            ConfigError: the file cannot be read or loaded.
            UnavailableError: loading takes longer than `start_timeout`.
        """
        config = self._config
        fix = "Fix environment.file. The service reads it on its own machine."
        code = "" if config.file is None else read_source(config.file, fix)
        where = "environment.tools" if config.file is None else str(config.file)
        file = {"path": where, "code": code, "options": config.options, "memory_mib": config.worker_memory_mib}
        first_message = {**file, **setup}
        self._workers = Workers(self._module, "environment", first_message, (), config.start_timeout, config.worker_environment)
        for number, worker in enumerate(await self._workers.spawn_all(config.workers)):
            self._places.append(self._begun(worker))
            self._run(self._keep(number))

    async def close(self) -> None:
        """Ends all processes and those that they started."""
        await end_all(self._tasks)
        if self._workers is not None:
            self._workers.close()

    def take(self) -> WorkerCalls:
        """The process with the fewest episodes, for one more, which `leave`s it. Raises FullError while the only ones are
        replaced, and EpisodeLostError when they cannot be."""
        if not (usable := self.usable):
            if (why := self._processes.last_error) is None:
                raise FullError("the worker processes are being replaced")
            raise EpisodeLostError(f"no worker process could be started: {why}")
        worker = min(usable, key=lambda each: each.episodes)
        worker.episodes += 1
        return worker

    async def _keep(self, place: int) -> None:
        """Keeps a process at its place. One that takes no more episodes may remain beside its successor, but not a second one."""
        former: WorkerCalls | None = None
        while True:
            current = self._places[place]
            assert current is not None
            await current.left.wait()
            if former is not None:
                former.end("its worker process was replaced", "timeout")
            self._places[place] = None
            self._metrics.workers_replaced.labels(current.reason).inc()
            former, self._places[place] = current, self._begun(await self._processes.respawn(lambda reason: None))

    def _begun(self, worker: Worker) -> WorkerCalls:
        calls = WorkerCalls(worker, self._limit, self._grace, self._processes.discard)
        self._run(calls.read())
        return calls

    def _run(self, work: Coroutine[object, object, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)
