"""Starts, restarts and ends processes.

Invariant: the processes of a set share their life: when one dies, all are ended and restarted. A child is not restarted if its
exit code stands for a permanent error, or if the kernel has ended each of its last starts for memory, and each set has a limited
number of restarts. When supervision ends, all its processes have ended.
"""

import asyncio
import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyreme.errors import ConfigError, GateError, RunFailedError, StaleTermError, UnavailableError
from polyreme.process.backoff import Backoff
from polyreme.process.lifecycle import Child, signal_name
from polyreme.process.machine import MemoryKills, killed_for_memory_since
from polyreme.process.tasks import end_all

logger = logging.getLogger(__name__)

FINAL_CODES = frozenset(kind.exit_code for kind in (ConfigError, UnavailableError, StaleTermError, GateError, RunFailedError))
"""Exit codes of permanent errors, after which a restart would fail again."""
_SET_END_TIMEOUT = 600.0
"""Seconds for the other processes of a set to end after the first one succeeded. One of them may still be saving."""
WELL_SECONDS = 300.0
"""The restart counter resets after this much healthy uptime."""
STARTS_WITHOUT_MEMORY = 3
"""After so many starts in a row that the kernel ended for memory, another one would end in the same way."""
_REASON_TIMEOUT = 10.0
"""Seconds to wait for the process that reports why one ended without a reason in its log."""
_ERROR_LINE = re.compile(r"error: |^(\(\w+ pid=\d+\) )?(ERROR [^\]]*\] )?[\w.]*(Error|Exception)\b")
_POINTS_ELSEWHERE = "root cause above"  # an error of vLLM that only says that there is another one
_MORE_MEMORY = "Allow more memory, or need less: `polyreme config check --memory` prints what each part needs."


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    death_signal: int = signal.SIGKILL
    """Signal for the process when this one dies. OWNER_DIED if it has children, files or shared memory to remove."""


class ChildFailedError(RunFailedError):
    """A child failed for good."""

    def __init__(self, child: Child, found: str, do: str = "") -> None:
        super().__init__(f"{child.name} to keep running", found, f"{do}{' ' * bool(do)}See {child.log_path}.")
        self.child = child


class ProcessSet:
    """Processes that start, fail and restart together.

    Args:
        name: for messages.
        programs: called at every start, since for example ports are chosen per start.
        log_dir: stdout and stderr are appended to NAME.log there.
        serves: whether the processes are servers, for which an unrequested exit with status 0 counts as a failure.
    """

    def __init__(self, name: str, programs: Callable[[], Sequence[ProcessSpec]], log_dir: Path, serves: bool = False) -> None:
        self.name, self.programs, self._log_dir, self._serves = name, programs, log_dir, serves
        self._children: list[Child] = []
        self._kills = MemoryKills()

    def start(self) -> None:
        """Starts every process. Raises RunFailedError when the system cannot start one; earlier ones keep running."""
        self._children, self._kills = [], MemoryKills.now()
        for program in self.programs():
            log_path = self._log_dir / f"{program.name}.log"
            try:
                self._children.append(Child.spawn(program.name, program.argv, program.env, log_path, program.death_signal))
            except OSError as error:
                raise RunFailedError(
                    f"{program.name} to start, its log in {log_path}", str(error), "Fix that, then continue with --resume."
                ) from None

    async def ended(self) -> Child | None:
        """Waits for the end of the process set. Returns the first child that failed, or None."""
        waiting = {asyncio.ensure_future(child.wait()): child for child in self._children}
        deadline: float | None = None
        try:
            while waiting:
                timeout = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
                done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    return next(iter(waiting.values()))
                ended = [(waiting.pop(task), task.result()) for task in done]
                if bad := [child for child, status in ended if status != 0 or self._serves]:
                    first = min(bad, key=lambda child: (child.poll() not in FINAL_CODES, child.pid))
                    return await self._with_a_reason(waiting) or first if _is_silent(first) else first
                deadline = deadline or asyncio.get_running_loop().time() + _SET_END_TIMEOUT
            return None
        finally:
            for task in waiting:
                task.cancel()

    async def _with_a_reason(self, waiting: Mapping[asyncio.Task[int], Child]) -> Child | None:
        """The first of the others that ends soon with an error in its log, or None."""
        if not waiting:
            return None
        done, _ = await asyncio.wait(waiting, timeout=_REASON_TIMEOUT)
        return next((waiting[task] for task in done if task.result() != 0 and not _is_silent(waiting[task])), None)

    def lacked_memory(self) -> str:
        """What the kernel has killed for memory since the start, and the limit; '' for nothing."""
        return killed_for_memory_since(self._kills)

    def signal(self, number: int) -> None:
        """Sends a signal to every process that still runs."""
        for child in self._children:
            child.signal(number)

    async def stop(self, grace: float) -> None:
        """Ends all processes and their groups: TERM, then KILL after `grace` seconds."""
        await asyncio.gather(*(child.stop(grace) for child in self._children))

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    async def reap(self) -> None:
        """Waits until every killed process is gone."""
        await asyncio.gather(*(child.reap() for child in self._children))


class Supervisor:
    """Runs process sets to their end.

    Args:
        process_sets: started together, supervised independently.
        max_restarts: of each process set.
        first_backoff: seconds before a process set's first restart.
        on_restart: called before each restart with the process set's name and how its process ended; must not block.
        well_seconds: the restart counter resets after this much healthy uptime.
    """

    def __init__(
        self,
        process_sets: Sequence[ProcessSet],
        max_restarts: int,
        first_backoff: float = 1.0,
        on_restart: Callable[[str, str], None] = lambda name, found: None,
        well_seconds: float = WELL_SECONDS,
    ) -> None:
        self._well_seconds = well_seconds
        self._process_sets, self._max_restarts, self._backoff = process_sets, max_restarts, restart_backoff(first_backoff)
        self._on_restart = on_restart
        self.draining = False
        """Set when the run should end: a child that dies then is not restarted."""

    async def run(self) -> None:
        """Returns when every process set has ended successfully.

        Raises:
            ChildFailedError: a process set failed for good. Every process has been ended.
            StaleTermError: another process has taken over a child's role. Every process has been ended.
        """
        tasks = [asyncio.create_task(self._keep(processes)) for processes in self._process_sets]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_all(tasks)
            for processes in self._process_sets:
                processes.kill()
            await asyncio.gather(*(processes.reap() for processes in self._process_sets))

    async def stop(self, grace: float) -> None:
        """Ends every process: TERM, then KILL after `grace` seconds."""
        self.draining = True
        await asyncio.gather(*(processes.stop(grace) for processes in self._process_sets))

    async def _keep(self, processes: ProcessSet) -> None:
        restart = without_memory = 0
        while True:
            processes.start()
            started = asyncio.get_running_loop().time()
            child = await processes.ended()
            if child is None or (self.draining and child.poll() == 0):
                return
            lack = processes.lacked_memory()
            processes.kill()
            await processes.reap()
            if asyncio.get_running_loop().time() - started > self._well_seconds:
                restart = without_memory = 0
            without_memory = without_memory + 1 if lack else 0
            if without_memory >= STARTS_WITHOUT_MEMORY:
                raise ChildFailedError(
                    child, f"{describe_end(child, lack)}, as at the {without_memory - 1} starts before", _MORE_MEMORY
                )
            self._judge(child, restart, lack)
            restart += 1
            pause = self._backoff.draw(restart)
            logger.warning("%s; restart %d of %d in %.1f s", describe_end(child, lack), restart, self._max_restarts, pause)
            self._on_restart(processes.name, describe_end(child, lack))
            await asyncio.sleep(pause)
            if self.draining:
                self._judge(child, restart - 1, lack)  # raises, because a stop was requested meanwhile

    def _judge(self, child: Child, restarts: int, lack: str = "") -> None:
        """Raises when the child must not be restarted. `lack`: as `ProcessSet.lacked_memory` returns it."""
        status = child.poll()
        message = last_error(child.log_tail(60))
        why = message or "its log is empty"
        if status == StaleTermError.exit_code:
            raise StaleTermError(f"{child.name} to keep its role", why, "Let the other process continue, or stop it.")
        if status not in FINAL_CODES and not self.draining and restarts < self._max_restarts:
            return
        if status in FINAL_CODES and message:
            raise ChildFailedError(child, message)
        spent = "" if status in FINAL_CODES or self.draining else f" after {restarts} restarts"
        raise ChildFailedError(child, f"{describe_end(child, lack)}{spent}: {why}", _MORE_MEMORY if lack else "")


def _is_silent(child: Child) -> bool:
    """Whether a child ended for good and left the reason to another one: a learner's ranks end after rank 0, which reports it."""
    return child.poll() in FINAL_CODES and not last_error(child.log_tail(60))


def restart_backoff(first: float = 1.0) -> Backoff:
    """Delays before restarts of a process: from `first` seconds up to 30."""
    return Backoff(first, longest=30.0)


def describe_end(child: Child, lack: str = "") -> str:
    """How a child ended, for messages. `lack`: what the kernel killed for memory meanwhile."""
    status = child.poll()
    if status is None:
        text = f"{child.name} did not end with the others"
    elif status < 0:
        text = f"{child.name} was ended by {signal_name(-status)}"
    else:
        text = f"{child.name} ended with status {status}"
    return f"{text} ({lack})" if lack else text


def last_error(log: str) -> str:
    """The line of a log that most likely states why its process exited, with the next line where a message only begins there."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if _ERROR_LINE.search(line)]
    errors = [number for number in errors if _POINTS_ELSEWHERE not in lines[number]] or errors
    first = (errors or [len(lines) - 1])[-1]
    line = " ".join(lines[first : first + 2]) if errors and lines[first].endswith(":") else "".join(lines[first : first + 1])
    return line.partition("error: ")[2] or line
