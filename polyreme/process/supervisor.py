"""Keeps processes running, and ends them.

Processes of one unit live and die together: when one dies, all are ended and started again. A child that says why it cannot go on
(an exit code of a PolyremeError that a restart would meet again) is not restarted, and each unit has so many restarts and no more.
However supervision ends, nothing that it started is left running.
"""

import asyncio
import logging
import random
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polyreme.errors import ConfigError, GateError, RunFailedError, StaleTermError, UnavailableError
from polyreme.process.lifecycle import Child

_log = logging.getLogger(__name__)

FINAL_CODES = frozenset(kind.exit_code for kind in (ConfigError, UnavailableError, StaleTermError, GateError, RunFailedError))
"""Exit codes after which a restart would end the same way."""
_TOGETHER_SECONDS = 600.0
"""How long a unit's other processes may take to end after the first has ended well: one of them still saves."""
WELL_SECONDS = 300.0
"""A unit that has run for so long was in order: its earlier restarts are forgotten, so that a long run bears any number of kills."""
_ERROR_LINE = re.compile(r"error: |^[\w.]*(Error|Exception)\b")


@dataclass(frozen=True)
class Program:
    """A process to start."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    death_signal: int = signal.SIGKILL
    """What it gets when this process dies: TERM for a process that has children or shared memory of its own to end."""


class ChildFailedError(RunFailedError):
    """A child that could not be kept running; `child` is the one."""

    def __init__(self, child: Child, found: str) -> None:
        super().__init__(f"{child.name} to keep running", found, f"See {child.log_path}.")
        self.child = child


class Unit:
    """Processes that live and die together.

    Args:
        name: for messages.
        programs: makes them anew for every start (a port, say, is chosen per start).
        log_dir: stdout and stderr go to NAME.log there, appended.
        serves: has no end of its own: one with status 0 that nobody asked for is a death like any other.
    """

    def __init__(self, name: str, programs: Callable[[], Sequence[Program]], log_dir: Path, serves: bool = False) -> None:
        self.name, self.programs, self._log_dir, self._serves = name, programs, log_dir, serves
        self._children: list[Child] = []

    def start(self) -> None:
        """Starts every process. Raises RunFailedError when the system lets one not start; those before it run."""
        self._children = []
        for program in self.programs():
            log_path = self._log_dir / f"{program.name}.log"
            try:
                self._children.append(Child.spawn(program.name, program.argv, program.env, log_path, program.death_signal))
            except OSError as error:
                raise RunFailedError(
                    f"{program.name} to start, its log in {log_path}", str(error), "Mend that, then go on with --resume."
                ) from None

    async def ended(self) -> Child | None:
        """Waits for the unit's end. Returns the child that ended badly first, or None when all ended well."""
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
                    return min(bad, key=lambda child: (child.poll() not in FINAL_CODES, child.pid))
                deadline = deadline or asyncio.get_running_loop().time() + _TOGETHER_SECONDS
            return None
        finally:
            for task in waiting:
                task.cancel()

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
    """Runs units to their end.

    Args:
        units: started at once, supervised apart.
        max_restarts: of each unit.
        first_backoff: seconds before a unit's first restart; see `backoff`.
        on_restart: called before each restart with the unit's name and how its process ended; must not block.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        max_restarts: int,
        first_backoff: float = 1.0,
        on_restart: Callable[[str, str], None] = lambda name, found: None,
    ) -> None:
        self._units, self._max_restarts, self._first_backoff = units, max_restarts, first_backoff
        self._on_restart = on_restart
        self.draining = False
        """Set it when the run shall end: a child that dies now is not restarted."""

    async def run(self) -> None:
        """Returns when every unit has ended well.

        Raises:
            ChildFailedError: a unit could not be kept running. Everything has been ended.
            StaleTermError: a child's role has been taken over by another process. Everything has been ended.
        """
        tasks = [asyncio.create_task(self._keep(unit)) for unit in self._units]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for unit in self._units:
                unit.kill()
            await asyncio.gather(*(unit.reap() for unit in self._units))

    async def stop(self, grace: float) -> None:
        """Asks every process to end, and ends those that have not within `grace` seconds."""
        self.draining = True
        await asyncio.gather(*(unit.stop(grace) for unit in self._units))

    async def _keep(self, unit: Unit) -> None:
        restart = 0
        while True:
            unit.start()
            started = asyncio.get_running_loop().time()
            child = await unit.ended()
            if child is None or (self.draining and child.poll() == 0):
                return
            unit.kill()
            await unit.reap()
            if asyncio.get_running_loop().time() - started > WELL_SECONDS:
                restart = 0
            self._judge(child, restart)
            restart += 1
            pause = backoff(restart, self._first_backoff)
            _log.warning("%s; restart %d of %d in %.1f s", describe_end(child), restart, self._max_restarts, pause)
            self._on_restart(unit.name, describe_end(child))
            await asyncio.sleep(pause)
            if self.draining:
                self._judge(child, restart - 1)  # raises: the end was asked for meanwhile

    def _judge(self, child: Child, restarts: int) -> None:
        """Raises when the child's end is the run's end."""
        status = child.poll()
        said = last_error(child.log_tail(60))
        why = said or "its log says nothing"
        if status == StaleTermError.exit_code:
            raise StaleTermError(f"{child.name} to keep its role", why, "Let the other process go on, or stop it.")
        if status not in FINAL_CODES and not self.draining and restarts < self._max_restarts:
            return
        if status in FINAL_CODES and said:
            raise ChildFailedError(child, said)
        spent = "" if status in FINAL_CODES or self.draining else f" after {restarts} restarts"
        raise ChildFailedError(child, f"{describe_end(child)}{spent}: {why}")


def backoff(restart: int, first: float = 1.0) -> float:
    """Seconds before the n-th restart (n from 1): doubling from `first`, at most 30, give or take a quarter."""
    return min(30.0, first * 2.0 ** (restart - 1)) * random.uniform(0.75, 1.25)


def describe_end(child: Child) -> str:
    """How a child ended, in words."""
    status = child.poll()
    if status is None:
        return f"{child.name} did not end with the others"
    if status < 0:
        return f"{child.name} was ended by {signal.Signals(-status).name}"
    return f"{child.name} ended with status {status}"


def last_error(log: str) -> str:
    """The line of a log that most likely tells why its process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if _ERROR_LINE.search(line)]
    return (telling or lines or [""])[-1].partition("error: ")[2] or (telling or lines or [""])[-1]
