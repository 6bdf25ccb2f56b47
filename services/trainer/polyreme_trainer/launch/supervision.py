"""The supervision of a run or a stage on this machine: its processes, its trackers, its notices, and its end.

Invariant: it is `done` when its processes have ended well, `stopped` when a stop came first, `failed` (with the reason) when a
process could not be kept running; summary.json has the same state. No process outlives this one.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import PolyremeError, RunFailedError, StaleTermError
from polyreme.experience.metric_records import ServiceNotice, TrackerFailed
from polyreme.experience.run import RunState
from polyreme.process.lifecycle import stop_event, until_set
from polyreme.process.supervisor import ChildFailedError, ProcessSet, Supervisor
from polyreme.process.tasks import end_all
from polyreme_trainer.launch.notifier import CLOSE_SECONDS as NOTICE_SECONDS
from polyreme_trainer.launch.notifier import Notifier
from polyreme_trainer.launch.tracker_processes import CLOSE_SECONDS, TrackerProcesses

logger = logging.getLogger(__name__)

_STOP_GRACE_SECONDS = 10.0
DRAIN_SECONDS = 540.0
"""Time for the current iteration or step and its save after a stop request. Compose and Kubernetes kill a container ten minutes
after the request; the remaining minute is for processes that do not drain, for the state and for the records."""
LEARNER = ("-m", "polyreme_trainer.learner")
"""Python's arguments for a learner rank, of a run or a stage."""


class Supervision(ABC):
    """Supervises a run or a stage until all processes are done, a stop is requested, or one cannot be kept running.

    Args:
        config, run_id: of the run or stage.
        process_sets: the processes to keep running.
        emit: takes the records of trackers and receivers that fail.
        on_restart: takes the name of a process that restarts, and why.
    """

    def __init__(
        self,
        config: RunConfig | StageConfig,
        run_id: str,
        process_sets: Sequence[ProcessSet],
        emit: Callable[[ServiceNotice | TrackerFailed], Awaitable[None]],
        on_restart: Callable[[str, str], None],
    ) -> None:
        self.config = config
        self.trackers = TrackerProcesses(config, run_id, emit)
        self.notifier = Notifier(config, run_id, emit)
        self.supervisor = Supervisor(process_sets, config.trainer.max_restarts, on_restart=on_restart)
        self.orphaned = self.stopped = False
        self.end: tuple[RunState, str] | None = None

    @abstractmethod
    async def follow_records(self, ended: asyncio.Event) -> None:
        """Takes the records until `ended` is set and all are read."""

    @abstractmethod
    async def final_state(self) -> tuple[RunState, str]:
        """The final state and its reason when every process has ended well."""

    @abstractmethod
    async def set_end(self, state: RunState, reason: str) -> tuple[RunState, str]:
        """Makes the final state known. Returns the one that holds."""

    @abstractmethod
    def write_end(self) -> None:
        """Writes the end into the run directory."""

    @abstractmethod
    async def ask_to_drain(self) -> None:
        """Asks the processes to finish the current iteration or step and to save."""

    async def stop_requested(self, signalled: asyncio.Event) -> None:
        """Waits until a stop is requested. Raises the failure that a process declares before."""
        await signalled.wait()

    def ended_well(self, error: ChildFailedError) -> bool:
        """Whether the end of a process is no failure, because of the stop request."""
        return False

    async def run(self) -> RunState:
        """Returns the final state when all is done, or drained and saved. Raises the error that ended it otherwise."""
        ended = asyncio.Event()
        records = asyncio.create_task(self.follow_records(ended))
        self.trackers.start()
        self.notifier.start()
        try:
            await self._supervise()
            self.end = await self.final_state()
            await self.set_end(*self.end)
            return self.end[0]
        except StaleTermError:
            self.end = None
            raise  # another trainer now owns the run
        except PolyremeError as error:
            if not self.orphaned:
                self.end = RunState.FAILED, str(error)
                with suppress(PolyremeError):  # the error may be the loss of Redis
                    self.end = await self.set_end(*self.end)
            raise
        finally:
            ended.set()
            if self.orphaned:
                records.cancel()
            await asyncio.gather(records, return_exceptions=self.orphaned)
            try:
                if self.end:
                    self.write_end()
            except OSError as error:
                logger.error("cannot write the end to summary.json: %s", error)
            await self.notifier.close(self.end, 0.0 if self.orphaned else NOTICE_SECONDS)
            await self.trackers.close(0.0 if self.orphaned else CLOSE_SECONDS)

    async def _supervise(self) -> None:
        stop = stop_event()
        work = asyncio.create_task(self.supervisor.run())
        stopped = asyncio.create_task(self.stop_requested(stop))
        tasks = (work, stopped)
        try:
            async with until_set(stop.orphaned):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    stopped.result()
                    await self._drain(work)
                try:
                    await work
                except ChildFailedError as error:
                    if not self.ended_well(error):
                        raise
                return
            # The services of the owner have died with it, and perhaps Redis, so nothing can drain.
            self.orphaned = True
            raise RunFailedError("the process that started this trainer to run", "that it has died", "Continue with --resume.")
        finally:
            await end_all(tasks)

    async def _drain(self, work: asyncio.Task[None]) -> None:
        """Lets the processes finish and save; ends those that do not."""
        self.supervisor.draining = self.stopped = True
        try:
            await self.ask_to_drain()
            await asyncio.wait({work}, timeout=DRAIN_SECONDS)
        except StaleTermError:
            raise  # another trainer has taken over the run: there is nothing to wait for
        except PolyremeError as error:
            logger.error("cannot ask the processes to drain: %s", error)
        if not work.done():
            await self.supervisor.stop(_STOP_GRACE_SECONDS)
