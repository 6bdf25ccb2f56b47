"""Processes that start in milliseconds, as forks of one process that has imported everything.

A fork runs its module like `python -m`, with its own environment, arguments and log, and as the leader of its own session. A `Nursery` in
the test starts forks and reports their ends; the forking process runs this module as a program.

Invariant: all processes of a nursery end with it.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyreme.process.lifecycle import die_with_parent
from support.fork_server import import_alone, run_as_main

_TESTS = Path(__file__).resolve().parents[1]


class Born:
    """A process of the nursery."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        self.over = asyncio.Event()

    def signal(self, number: int) -> None:
        """Sends a signal to the process, not its group, unless it has ended."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end_group(self) -> None:
        """Kills the process and its group, unless it has ended, since its pid may then be reused."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Nursery:
    """Starts processes by forking. Create it with `open`; `close` kills everything that it started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._born: dict[int, Born] = {}
        self._asked: asyncio.Queue[int] = asyncio.Queue()
        self._lock = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, modules: Sequence[str]) -> "Nursery":
        """Creates a nursery that has imported `modules`."""
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment = {**os.environ, **threads, "PYTHONPATH": str(_TESTS)}
        command = (sys.executable, "-m", "support.nursery", *modules)
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        nursery = cls(process)
        await asyncio.wait_for(nursery._asked.get(), 300)
        return nursery

    async def spawn(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Born:
        """Runs `python -m module arguments` with its output appended to `log`."""
        order = {"module": module, "arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        async with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            pid = await asyncio.wait_for(self._asked.get(), 300)
        return self._born[pid]

    async def close(self) -> None:
        for born in self._born.values():
            born.end_group()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._reader.cancel()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            word, pid, status = (int(part) for part in line.split())
            if word == 1:
                self._born[pid] = Born(pid)
                self._asked.put_nowait(pid)
            elif word == 0:
                self._asked.put_nowait(0)
            else:
                self._born[pid].status = status
                self._born[pid].over.set()


def _say(word: int, pid: int, status: int) -> None:
    os.write(1, f"{word} {pid} {status}\n".encode())


def _child(order: dict[str, Any], parent: int) -> int:
    """Runs in the fork. Returns its exit status."""
    os.setsid()
    die_with_parent(parent)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(order["environment"])
    return run_as_main(order["module"], order["arguments"])


def _main() -> None:
    import_alone(sys.argv[1:])
    parent = os.getpid()
    _say(0, 0, 0)
    pending = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *orders, pending = (pending + data).split(b"\n")
            for order in orders:
                pid = os.fork()
                if pid == 0:
                    sys.exit(_child(json.loads(order), parent))
                _say(1, pid, 0)
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                _say(2, pid, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _main()
