"""Keeps one process running for each tracker of a run.

Invariant: no tracker can stop, fail or delay a run. One that fails or stalls is restarted with backoff, at most ATTEMPTS times in
a row. Every failure is counted; the first is also a notice. At a run's end, all trackers together have CLOSE_SECONDS.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from polyreme.config.base import BaseConfig
from polyreme.errors import PolyremeError
from polyreme.experience.metric_records import ServiceNotice, TrackerFailed
from polyreme.process.backoff import Backoff
from polyreme.process.lifecycle import Child
from polyreme_trainer.observe.trackers.follow import read_cursor

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "polyreme_trainer.observe.trackers")
CLOSE_SECONDS = 30.0
STALL_SECONDS = 300.0
"""A tracker that sends none of the waiting records for this long is restarted."""
ATTEMPTS = 20
"""After this many failures in a row without a sent record, a tracker is not restarted until the run is started again."""
_BACKOFF = Backoff(2.0, 60.0)
_WATCH_SECONDS = 5.0

Emit = Callable[[ServiceNotice | TrackerFailed], Awaitable[None]]


class TrackerProcess:
    """One tracker's process.

    Args:
        config, run_id: the run's configuration and id. Its directory exists.
        emit: appends to the run's records.
    """

    def __init__(self, config: BaseConfig, run_id: str, kind: str, emit: Emit) -> None:
        self._run_dir, self._run_id, self._kind, self._emit = config.run_dir, run_id, kind, emit
        self._log_path = config.run_dir / "trackers" / f"{kind}.log"
        self._child: Child | None = None
        self.failures = 0

    @property
    def offset(self) -> int:
        """The bytes of metrics.jsonl that the tracker has sent."""
        return read_cursor(self._run_dir, self._kind, self._run_id).offset

    @property
    def behind(self) -> bool:
        """Whether metrics.jsonl has more to send."""
        with suppress(FileNotFoundError):
            return self.offset < (self._run_dir / "metrics.jsonl").stat().st_size
        return False

    @property
    def ended(self) -> bool:
        """Whether the tracker has no running process."""
        return self._child is None or self._child.poll() is not None

    async def keep(self) -> None:
        """Runs the process, and again after each failure. Returns after ATTEMPTS failures in a row; cancel it to end earlier."""
        attempt = 0
        while attempt < ATTEMPTS:
            attempt += 1
            try:
                before = self.offset
                await self._watch(self._spawn())
                attempt = attempt if self.offset == before else 1
                await self._report()
            except (PolyremeError, OSError) as error:  # no process can be started, or its cursor cannot be read
                await self._report(str(error))
            await asyncio.sleep(_BACKOFF.draw(attempt))
        await self._notice(
            f"the tracker {self._kind} failed {ATTEMPTS} times in a row and is not restarted; a resume sends the rest"
        )

    async def close(self) -> None:
        """Lets the tracker send the remaining records. Call it after `keep` was cancelled."""
        status: int | None = None
        if self._child is not None and not self.ended:
            self._child.signal(signal.SIGTERM)
            status = await self._child.wait()
        if status != 0:  # it was not running, or ended before it handled the signal
            status = await self._spawn("--last").wait()
        if status:
            await self._report()

    async def end(self) -> None:
        """Kills the process if it is still running."""
        if self._child is not None:
            self._child.kill()
            await self._child.reap()
        if self.behind:
            await self._notice(f"the tracker {self._kind} lacks the newest records; a resume sends them")

    def _spawn(self, *options: str) -> Child:
        words = (*PROGRAM, str(self._run_dir), self._run_id, self._kind, *options)
        self._log_path.parent.mkdir(exist_ok=True)
        self._child = Child.spawn(f"tracker-{self._kind}", words, {"OMP_NUM_THREADS": "1"}, self._log_path)
        return self._child

    async def _watch(self, child: Child) -> None:
        """Returns when the process has ended, or was killed because it stalled."""
        loop = asyncio.get_running_loop()
        last, since = self.offset, loop.time()
        while not await child.gone(_WATCH_SECONDS):
            if (now := self.offset) != last or not self.behind:
                last, since = now, loop.time()
            elif loop.time() - since > STALL_SECONDS:
                logger.warning("the tracker %s sent nothing for %.0f s", self._kind, STALL_SECONDS)
                child.kill()
                await child.reap()
                return

    async def _report(self, reason: str = "") -> None:
        """Counts a failure, and emits a notice for the first. Without a reason, it has the end of the process's output."""
        self.failures += 1
        text = reason or (self._child.log_tail(1) if self._child else "")
        if self.failures == 1:
            await self._notice(f"the tracker {self._kind} failed and is restarted: {text}; see {self._log_path}")
        with suppress(PolyremeError):  # Redis may be unreachable
            await self._emit(TrackerFailed(tracker=self._kind, failures=self.failures, text=text))

    async def _notice(self, text: str) -> None:
        logger.warning("%s", text)
        with suppress(PolyremeError):
            await self._emit(ServiceNotice(service="train", text=text))


class TrackerProcesses:
    """The trackers of a run."""

    def __init__(self, config: BaseConfig, run_id: str, emit: Emit) -> None:
        self.each: Sequence[TrackerProcess] = [TrackerProcess(config, run_id, section.kind, emit) for section in config.trackers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts every process."""
        self._tasks = [asyncio.create_task(tracker.keep()) for tracker in self.each]

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Lets all trackers send the remaining records within `seconds`, then ends them."""
        for task in self._tasks:
            task.cancel()
        await _all(self._tasks)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await _all(tracker.close() for tracker in self.each)
        await _all(tracker.end() for tracker in self.each)


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Waits for all. Logs their errors, since a failure of a tracker is not a failure of the run."""
    for error in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(error, Exception):
            logger.error("a tracker failed: %s", error)
