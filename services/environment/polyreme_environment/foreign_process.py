"""Processes of another package, which has a Python and packages of its own.

Invariant: a process ends with its owner, however that ends. It sees no secret of the service.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from polyreme.errors import ConfigError, PolyremeError, UnavailableError
from polyreme.isolation.privacy import scrubbed
from polyreme.process.backoff import Backoff
from polyreme.process.tasks import end_all, running

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_BACKOFF = Backoff(1.0, longest=30.0)
"""Seconds before processes are started again."""
_TOLD = 1500
"""Characters of its last output in an error."""
_OWNED = """
import os, signal, threading

def end_with_owner():
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    threading.Thread(target=end_with_owner, daemon=True).start()
"""
"""The beginning of its program: its standard input ends when its owner does."""


class ForeignProcess:
    """The process. Its output goes to the service's log, after `label`."""

    def __init__(self, label: str, process: asyncio.subprocess.Process) -> None:
        self._label, self._process = label, process
        self._told = ""
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> str:
        """Waits until it has ended. Returns how, with its last output."""
        status = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=_STOP_SECONDS)  # a process that it started may hold its output open
        return f"exited with status {status}: {self._told.strip() or 'no output'}"

    async def close(self) -> None:
        """Ends it, and what is left of its process group."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await end_all([self._reading])

    async def _read(self) -> None:
        assert self._process.stdout is not None
        rest = ""
        while chunk := (await self._process.stdout.read(1 << 16)).decode(errors="replace"):
            self._told = (self._told + chunk)[-_TOLD:]
            *lines, rest = (rest + chunk).split("\n")
            if len(rest) > _TOLD:
                lines, rest = [*lines, rest], ""
            for line in lines:
                logger.info("%s: %s", self._label, line)


async def run_foreign(
    label: str,
    venv: Path,
    code: str,
    arguments: Sequence[str],
    keep: Collection[str],
    folder: str | None = None,
    **variables: str,
) -> ForeignProcess:
    """Starts `code` with the Python of a virtual environment.

    Args:
        keep: names of variables that it gets in addition to the usual ones.
        folder: its working directory; None: that of the service.
        variables: further ones, with their values.

    Raises:
        ConfigError: there is no such Python.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            str(venv / "bin" / "python"), "-c", _OWNED + code, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**scrubbed(os.environ, keep), "PYTHONUNBUFFERED": "1", **variables}, start_new_session=True, cwd=folder,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"a virtual environment at {venv}", str(error), "Fix environment.venv.") from None
    return ForeignProcess(label, process)


async def until_answers(
    what: str, processes: Sequence[ForeignProcess], answers: Callable[[], Awaitable[bool]], seconds: float
) -> None:
    """Asks until they answer.

    Raises:
        ConfigError: one of them has ended.
        UnavailableError: there is no answer within `seconds`, environment.start_timeout.
    """
    try:
        async with running(*(process.wait() for process in processes)) as ended, asyncio.timeout(seconds):
            while not await answers():
                for each in ended:
                    if each.done():
                        raise ConfigError(what, f"a process that {each.result()}", "See its message.")
    except TimeoutError:
        limit = f"environment.start_timeout = {seconds:g} s"
        raise UnavailableError(f"{what} within {limit}", "no answer", "Raise it, or see the log.") from None


class KeptProcesses:
    """Processes that serve together. When one ends, all are replaced, after longer and longer waits while that fails.

    Args:
        serve: starts them, and waits until they answer; it ends them when it fails.
        lost: is told how they ended, before they are replaced.
    """

    def __init__(self, serve: Callable[[], Awaitable[Sequence[ForeignProcess]]], lost: Callable[[str], Awaitable[None]]) -> None:
        self._serve, self._lost = serve, lost
        self._processes: Sequence[ForeignProcess] = ()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def are_serving(self) -> bool:
        return bool(self._processes)

    async def start(self) -> None:
        """Raises as `serve`."""
        self._processes = await self._serve()
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Ends them."""
        if self._keeping is not None:
            await end_all([self._keeping])
        await self._end()

    async def _keep(self) -> None:
        while True:
            how = await _first_end(self._processes)
            logger.warning("a process of another package %s", how)
            await self._lost(how)
            await self._end()
            failures = 0
            while not self._processes:
                failures += 1
                await asyncio.sleep(_BACKOFF.draw(failures))
                try:
                    self._processes = await self._serve()
                except PolyremeError as error:
                    logger.warning("%s", error)

    async def _end(self) -> None:
        processes, self._processes = self._processes, ()
        await asyncio.gather(*(process.close() for process in processes))


async def _first_end(processes: Sequence[ForeignProcess]) -> str:
    """Waits until one has ended. Returns how."""
    async with running(*(process.wait() for process in processes)) as waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()
