"""A process of another package, which has a Python and packages of its own.

Invariant: the process ends with its owner, however that ends. It sees no secret of the service.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.isolation.privacy import scrubbed

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
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

    async def wait(self) -> str:
        """Waits until it has ended. Returns how, with its last output."""
        status = await self._process.wait()
        with suppress(TimeoutError):  # a process that it started may hold its output open
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(self._reading)
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
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

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
    label: str, venv: Path, code: str, arguments: Sequence[str], keep: Collection[str], **variables: str
) -> ForeignProcess:
    """Starts `code` with the Python of a virtual environment.

    Args:
        keep: names of variables that it gets in addition to the usual ones.
        variables: further ones, with their values.

    Raises:
        ConfigError: there is no such Python.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            str(venv / "bin" / "python"), "-c", _OWNED + code, *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**scrubbed(os.environ, keep), "PYTHONUNBUFFERED": "1", **variables}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"a virtual environment at {venv}", str(error), "Fix environment.venv.") from None
    return ForeignProcess(label, process)
