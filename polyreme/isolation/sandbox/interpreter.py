"""A Python interpreter in a sandbox, which keeps its state from call to call.

Invariant: every call ends by its deadline, and nothing of the program runs between two calls: its process is stopped. What a
program writes is kept up to a bound, and the rest is read and dropped. An interpreter that breaks a limit, or that its code ends,
is gone with its state; the next call starts another.
"""

import os
import selectors
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import IO

from polyreme.isolation.sandbox.inside import values
from polyreme.isolation.sandbox.program import Limits, Mode, Program, SandboxError

_LOOK_SECONDS, _REST_SECONDS = 0.05, 0.005
_EXIT_SECONDS = 1.0
_REPLY_BYTES = 4096
_READS = 64
_CPU_SECONDS = 24 * 3600.0
"""Of all calls together. The deadline of each bounds its own."""


class LateStartError(SandboxError):
    """The interpreter did not start within the seconds of its call."""


@dataclass(frozen=True)
class Said:
    """What a call has shown, and why it failed ("": it did not)."""

    text: str
    error: str


class Interpreter:
    """An interpreter that starts at its first call. It has one caller at a time, which must close it.

    Args:
        mode: the isolation.
        limits: of the program. `seconds` is the most that a call may take, and `output_bytes` what is kept of its output.
    """

    def __init__(self, mode: Mode, limits: Limits) -> None:
        self._mode, self._limits = mode, limits
        self._life = ExitStack()
        self._program: Program | None = None
        self._channel: socket.socket
        self._process: int

    def run(self, code: str, seconds: float) -> Said:
        """Executes code.

        Args:
            seconds: until the call must end, with a start of the interpreter if it needs one.

        Raises:
            SandboxError: the interpreter could not be started; LateStartError: in time.
        """
        deadline = time.monotonic() + seconds
        program = self._program or self._start(deadline)
        seconds = min(deadline - time.monotonic(), self._limits.seconds)
        deadline = time.monotonic() + seconds
        self._signal(signal.SIGCONT)
        shown = _Output(self._limits.output_bytes)
        reply, over = self._follow(program, code, deadline, shown)
        if over is None and reply.endswith(b"\n"):
            self._signal(signal.SIGSTOP)
            shown.take(program.pipes[0][0])
            return Said(shown.text(), reply.decode("utf-8", "replace").strip())
        reason = _end(program, over, seconds)
        shown.take(program.pipes[0][0])
        self.close()
        told = f"({reason}; its variables and files are gone, and the next call starts a new one)"
        return Said("\n".join(filter(None, (shown.text(), told))), reason)

    def close(self) -> None:
        """Ends the interpreter, if there is one."""
        self._program = None
        self._life.close()

    def _start(self, deadline: float) -> Program:
        with ExitStack() as life:
            ours, theirs = socket.socketpair()
            life.enter_context(ours)
            with theirs:
                limits = replace(self._limits, seconds=_CPU_SECONDS)
                program = Program.start(self._mode, {"kind": "interpret"}, "", limits, theirs, life)
            _await_start(program, deadline)
            self._channel, self._process = ours, os.pidfd_open(program.pid)
            life.callback(os.close, self._process)
            os.set_blocking(program.pipes[0][0].fileno(), False)
            self._program, self._life = program, life.pop_all()
        return program

    def _follow(self, program: Program, code: str, deadline: float, shown: "_Output") -> tuple[bytes, str | None]:
        """Sends the code and reads until the call is over. Returns the reply, which may lack its end, and the broken limit."""
        stdout, reply = program.pipes[0][0], b""
        self._channel.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._channel.sendall(values.frame(code))
        except TimeoutError:
            return reply, "time"
        except ConnectionError:
            return reply, None
        look_at, has_written = time.monotonic() + _LOOK_SECONDS, False
        with selectors.DefaultSelector() as any_news, selectors.DefaultSelector() as answers:
            for selector, fds in ((any_news, (stdout, self._channel)), (answers, (self._channel,))):
                for fd in fds:
                    selector.register(fd, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if now > deadline:
                    return reply, "time"
                if now > look_at:
                    look_at = now + _LOOK_SECONDS
                    if (over := program.broken_limit()) is not None:
                        return reply, over
                # A program that writes line by line would wake this process with each one, so it rests after each look.
                ready = answers.select(_REST_SECONDS) if has_written else any_news.select(_LOOK_SECONDS)
                news = [key.fileobj for key, _ in ready]
                has_written = stdout in news
                shown.take(stdout)
                if self._channel in news:
                    data = _received(self._channel)
                    reply += data
                    if not data or b"\n" in data or len(reply) > _REPLY_BYTES:
                        return reply, None

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # `_follow` notices it
            signal.pidfd_send_signal(self._process, number)


def _end(program: Program, over: str | None, seconds: float) -> str:
    """Ends the program. Returns why, as a clause."""
    if over is None:  # it has closed its channel, so it ends in all likelihood
        with suppress(subprocess.TimeoutExpired):
            program.popen.wait(_EXIT_SECONDS)
    status = program.end()
    if over is None:
        return f"the interpreter has ended with exit status {status if status >= 0 else 128 - status}"
    if over == "time":
        return f"the interpreter was ended, since the call took longer than {seconds:.3g} s"
    return f"the interpreter was ended, since the code exceeds the limit of {over}"


def _await_start(program: Program, deadline: float) -> None:
    """Waits for the first byte of the sandbox's own code. Raises SandboxError."""
    pipe, name = program.pipes[1]
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            raise LateStartError("the interpreter did not start in time")
    if not program.take(pipe, name):
        raise SandboxError(program.complaint())


def _received(channel: socket.socket) -> bytes:
    try:
        return channel.recv(_REPLY_BYTES)
    except (ConnectionError, TimeoutError):
        return b""


class _Output:
    """The beginning and the end of what a program writes, which have at most `limit` bytes together."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0

    def take(self, pipe: IO[bytes]) -> None:
        """Takes what is there, of a pipe that does not block."""
        for _ in range(_READS):  # a bound, since the program may write faster
            try:
                data = os.read(pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return
            room = self._half - len(self._head)
            self._head += data[:room]
            self._tail += data[room:]
            if (extra := len(self._tail) - self._half) > 0:
                self._left_out += extra
                del self._tail[:extra]
            if not data:
                return

    def text(self) -> str:
        if not self._left_out:
            return (self._head + self._tail).decode("utf-8", "replace").rstrip("\n")
        head, tail = (part.decode("utf-8", "ignore").rstrip("\n") for part in (self._head, self._tail))
        return f"{head}\n... ({self._left_out} bytes are left out) ...\n{tail}"
