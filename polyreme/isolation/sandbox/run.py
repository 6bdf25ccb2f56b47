"""Runs programs to their end.

Invariant: every started program has ended when `run` or `check` returns. A sandbox that could not be set up raises SandboxError
and is never a failed test.

The time limit starts with the first byte from the sandbox's own code, so a slow start does not reduce a program's time.
"""

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from polyreme.isolation.sandbox.program import Limits, Mode, Program, SandboxError

_START_SECONDS = 30.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Ended:
    """How a program ended. `over`: the limit that it broke, if any. `status`: exit status, negative or above 128 for a signal."""

    over: str | None
    status: int
    stdout: bytes
    result: bytes

    @property
    def well(self) -> bool:
        return self.over is None and self.status == 0


def run(mode: Mode, job: Mapping[str, object], stdin: str, limits: Limits, look_seconds: float = _LOOK_SECONDS) -> Ended:
    """Runs one program.

    Args:
        mode: the isolation.
        job: as described in `inside/child.py`, without `limits`, `paths` and `folder`.
        stdin: standard input of the program.
        limits: limits beyond which the program is killed.
        look_seconds: between two looks at what it uses.

    Raises:
        SandboxError: the program could not be started.
    """
    with ExitStack() as stack:
        return _watch([Program.start(mode, job, stdin, limits, None, stack)], limits, look_seconds)


def check(mode: Mode, program: str, test: str, limits: Limits) -> str:
    """Runs a test in one sandbox against a program in another. Returns "pass", "fail", or "error: " and the reason.

    Raises:
        SandboxError: a sandbox could not be started.
    """
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            judge = Program.start(mode, {"kind": "check", "test": test}, "", limits, ours, stack)
            judged = Program.start(mode, {"kind": "serve", "program": program}, "", limits, theirs, stack)
        ended = _watch([judge, judged], limits, _LOOK_SECONDS)
        verdict = ended.result.decode("utf-8", "replace")
        return verdict if ended.well and verdict else "fail"


def _watch(programs: Sequence[Program], limits: Limits, look_seconds: float) -> Ended:
    """Waits until the first program ends or any program breaks a limit."""
    first = programs[0]
    start_by, look_at = time.monotonic() + _START_SECONDS, time.monotonic() + look_seconds
    end_by: float | None = None
    over: str | None = None
    with selectors.DefaultSelector() as selector, _pidfd(first.popen.pid) as ended:
        selector.register(ended, selectors.EVENT_READ)
        for program in programs:
            for pipe, name in program.pipes:
                selector.register(pipe, selectors.EVENT_READ, (program, name))
        while over is None:
            ready = [key for key, _ in selector.select(look_seconds)]
            if any(key.fileobj is ended for key in ready):
                break
            for key in ready:
                program, name = key.data
                if not program.take(key.fileobj, name):
                    selector.unregister(key.fileobj)
                elif len(program.output[name]) > limits.output_bytes:
                    over = "output"
            now = time.monotonic()
            if end_by is None and all(program.started for program in programs):
                end_by = now + limits.seconds
            if now > (end_by or start_by):
                over = "time"
            if over is None and end_by is not None and now >= look_at:  # earlier checks would measure the sandbox's own setup
                look_at = now + look_seconds
                over = next(filter(None, (program.broken_limit() for program in programs)), None)
    status = first.end()
    for program in programs:
        program.drain()
        if not program.started:
            raise SandboxError(program.complaint())
    stdout, result = (first.output[name] for _, name in first.pipes)
    if over is None and len(stdout) > limits.output_bytes:
        over = "output"
    return Ended(over, status, stdout, result[1:])


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)
