"""Keeps a process for each tracker of a run.

Invariant: no tracker can stop, fail or delay a run. A tracker that fails or stands still is restarted with backoff, a bounded number of
times in a row; its first failure is a notice, each is counted. At the run's end all have CLOSE_SECONDS together.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme.process.backoff import Backoff
from polyreme.process.lifecycle import Child
from polyreme_trainer.observe.trackers.follow import read_cursor

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "polyreme_trainer.observe.trackers")
CLOSE_SECONDS = 60.0
STALL_SECONDS = 300.0
"""How long a tracker may take nothing of what is there, before its process is replaced."""
ATTEMPTS = 20
"""Failures in a row without a record sent, after which a tracker is left alone until the run is started again."""
_BACKOFF = Backoff(2.0, 60.0)
_WATCH_SECONDS = 5.0

Emit = Callable[[dict[str, Any]], Awaitable[None]]


class TrackerProcess:
    """One tracker's process.

    Args:
        config, run_id: of the run; its directory exists.
        emit: adds to the run's records.
    """

    def __init__(self, config: RunConfig, run_id: str, kind: str, emit: Emit) -> None:
        self._run_dir, self._run_id, self._kind, self._emit = config.run_dir, run_id, kind, emit
        self._log_path = config.run_dir / "trackers" / f"{kind}.log"
        self._child: Child | None = None
        self.failures = 0

    @property
    def offset(self) -> int:
        """Bytes of metrics.jsonl that the tracker has taken."""
        return read_cursor(self._run_dir, self._kind, self._run_id).offset

    @property
    def behind(self) -> bool:
        """Whether there is more for it to take."""
        with suppress(FileNotFoundError):
            return self.offset < (self._run_dir / "metrics.jsonl").stat().st_size
        return False

    @property
    def ended(self) -> bool:
        """Whether no process of it runs."""
        return self._child is None or self._child.poll() is not None

    async def keep(self) -> None:
        """Runs the process, again after each failure. Returns when it is given up; cancel it to end."""
        attempt = 0
        while attempt < ATTEMPTS:
            before = self.offset
            await self._watch(self._spawn())
            attempt = attempt + 1 if self.offset == before else 1
            await self._report()
            await asyncio.sleep(_BACKOFF.draw(attempt))
        await self._notice(
            f"the tracker {self._kind} failed {ATTEMPTS} times in a row and is left alone; a resume sends the rest"
        )

    async def close(self) -> None:
        """Lets the tracker take what is left. After `keep` was cancelled."""
        child = self._child
        if child is not None and child.poll() is None:
            child.signal(signal.SIGTERM)
            status = await child.wait()
        if child is None or child.poll() != 0:  # it was away, or ended before it could read the signal
            status = await self._spawn("--last").wait()
        if status:
            await self._report()

    async def end(self) -> None:
        """Kills the process if it still runs."""
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
        """Returns when the process has ended, or was killed because it stood still."""
        loop = asyncio.get_running_loop()
        last, since = self.offset, loop.time()
        while not await child.gone(_WATCH_SECONDS):
            if (now := self.offset) != last or not self.behind:
                last, since = now, loop.time()
            elif loop.time() - since > STALL_SECONDS:
                logger.warning("the tracker %s took nothing for %.0f s", self._kind, STALL_SECONDS)
                child.kill()
                await child.reap()
                return

    async def _report(self) -> None:
        """Counts a failure; the first one is a notice."""
        self.failures += 1
        tail = self._child.log_tail(1) if self._child else ""
        if self.failures == 1:
            await self._notice(f"the tracker {self._kind} failed and is tried again: {tail}; see {self._log_path}")
        with suppress(PolyremeError):  # the store may be away
            await self._emit({"kind": "tracker_failed", "tracker": self._kind, "failures": self.failures, "text": tail})

    async def _notice(self, text: str) -> None:
        logger.warning("%s", text)
        with suppress(PolyremeError):
            await self._emit({"kind": "notice", "service": "train", "text": text})


class TrackerProcesses:
    """The trackers of a run."""

    def __init__(self, config: RunConfig, run_id: str, emit: Emit) -> None:
        self.each: Sequence[TrackerProcess] = [TrackerProcess(config, run_id, section.kind, emit) for section in config.trackers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts every process."""
        self._tasks = [asyncio.create_task(tracker.keep()) for tracker in self.each]

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Lets all trackers take what is left within so many seconds, then ends them."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                logger.error("a tracker's supervision failed: %s", error)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(tracker.close() for tracker in self.each))
        await asyncio.gather(*(tracker.end() for tracker in self.each))
