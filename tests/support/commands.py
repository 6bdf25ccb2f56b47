"""Python processes that start in milliseconds, since each is a fork of one process that has imported their modules.

Invariant: a fork has its own session, environment, directory and outputs, like a process that a shell starts. Forks do not test the imports
of a module at its start.
"""

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

from polyreme.process.lifecycle import Child
from support import fork_server

MODULES = (
    "polyreme.cli.commands.audit",
    "polyreme.cli.commands.config",
    "polyreme.cli.main",
    "polyreme.cli.commands.up",
    "polyreme_reward.command",
    "polyreme_reward.server",
    "polyreme_rollout.testing.simulated_replicas",
    "polyreme_trainer.checks",
    "polyreme_trainer.orchestrator.main",
    "polyreme_trainer.testing.simulated_learner",
    "polyreme_trainer.testing.simulation",
    "tensorboardX",
    "transformers.tokenization_utils_base",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.auto",
)
FORKED = ("polyreme_trainer.orchestrator", "polyreme_trainer.testing.simulated_learner")
"""Modules that run as forks when the child of a `spawn` starts them through its interpreter's path."""
_DEADLINE = 300.0  # seconds


class Fork:
    """A process that the parent has forked, with the parts of `subprocess.Popen` that `Child` and tests use."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        self.stdout: TextIO | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float = _DEADLINE) -> int:
        """Waits for its end. Raises TimeoutExpired after `timeout` seconds."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float) -> int | None:
        if self.returncode is not None:
            return self.returncode
        ended = select.poll()  # select.select would not accept descriptors above 1023
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(seconds * 1000):
            os.close(self._pidfd)
            self.returncode = _parent().ask({"reap": self.pid})
        return self.returncode


@dataclass(frozen=True)
class Started:
    """A running or finished command.

    Attributes:
        argv: its arguments.
        out, err: files of its outputs, which may be the same file.
    """

    argv: tuple[str, ...]
    process: Fork
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """Waits for its end. Kills it when it has not ended after 300 s, and raises TimeoutExpired."""
        try:
            status = self.process.wait()
        finally:
            self.process.kill()
        return subprocess.CompletedProcess(self.argv, status, self.out.read_text(), self.err.read_text())


def polyreme(*argv: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs `polyreme argv` to its end."""
    return start(*argv, cwd=cwd, together=False, **environment).wait()


def start(*argv: str, cwd: Path | None = None, together: bool = False, **environment: str) -> Started:
    """Starts `polyreme argv` without Polyreme's variables. `together`: both outputs go to one file, in the order of writing."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    folder = Path(tempfile.mkdtemp(prefix="command-", dir=_parent().folder))
    out, err = folder / "out", folder / ("out" if together else "err")
    with open(out, "ab") as stdout, open(err, "ab") as stderr:
        outputs = stdout.fileno(), stderr.fileno()
        process = fork("polyreme", argv, {**clean, "COLUMNS": "120", **environment}, outputs, cwd)
    return Started(argv, process, out, err)


def search_path() -> str:
    """A PATH for shells in which `polyreme` is a fork and `python` is this interpreter."""
    return f"{_parent().folder}:{os.environ['PATH']}"


def spawn(
    name: str, module: str, argv: Sequence[str], environment: Mapping[str, str], log: Path, executable: str | None = None
) -> Child:
    """As `Child.spawn`: starts `python -m module argv`. `environment` is added to this process's; the output is appended to `log`.

    If it starts modules of FORKED itself, these are also forks of the parent, behind a stand-in that is its child, unless `executable` is
    set.
    """
    with open(log, "ab") as file:
        outputs = file.fileno(), file.fileno()
        process = fork(module, argv, {**os.environ, **environment}, outputs, executable=executable or str(_parent().launcher))
    return Child(name, cast("subprocess.Popen[bytes]", process), log)


def fork(
    module: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    cwd: Path | None = None,
    executable: str = sys.executable,
    terminal: bool = False,
) -> Fork:
    """Starts `python -m module argv` with only `environment`.

    Args:
        outputs: file descriptors for its stdout and stderr.
        cwd: its working directory; this process's by default.
        executable: the value of `sys.executable` in it.
        terminal: whether its stdout becomes its controlling terminal.
    """
    order = {
        "module": module,
        "argv": list(argv),
        "cwd": str(cwd or Path.cwd()),
        "environment": dict(environment),
        "executable": executable,
        "terminal": terminal,
    }
    return Fork([executable, "-m", module, *argv], _parent().ask(order, outputs))


@contextmanager
def piped(module: str, argv: Sequence[str], environment: Mapping[str, str], executable: str = sys.executable) -> Iterator[Fork]:
    """Starts a fork with both outputs in its `stdout`. Kills it at the end of the block."""
    read_end, write_end = os.pipe()
    with open(read_end) as stdout:
        try:
            process = fork(module, argv, environment, (write_end, write_end), executable=executable)
        finally:
            os.close(write_end)
        process.stdout = stdout
        try:
            yield process
        finally:
            process.kill()
            process.wait()


_LAUNCHER = """#!{python} -IS
import json, os, select, signal, socket, sys
if sys.argv[0].endswith("/polyreme"):
    module, argv = "polyreme", sys.argv[1:]
elif sys.argv[1:2] == ["-m"] and sys.argv[2] in {forked}:
    module, argv = sys.argv[2], sys.argv[3:]
else:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
parent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
parent.connect({address!r})
order = {{"module": module, "argv": argv, "cwd": os.getcwd(), "environment": dict(os.environ)}}
order |= {{"executable": {python!r}, "terminal": False}}
socket.send_fds(parent, [json.dumps(order).encode()], [1, 2])
pid = int(parent.recv(64))
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
while not select.select([parent], [], [], 0.1)[0]:  # a signal that comes just before a wait is handled after it
    pass
status = int(parent.recv(64))
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
"""A stand-in for the interpreter or for `polyreme`. Its process lives as long as the fork that it requests and has the same exit status,
and
the fork ends with it."""


class _Parent:
    """The client of the process that forks. That process ends with this one, and the forks end with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polyreme-commands-"))
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        address = self.folder / "socket"
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            listener.listen()
            listener.set_inheritable(True)
            command = [sys.executable, fork_server.__file__, str(listener.fileno()), *MODULES]
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), env=os.environ | one_thread, start_new_session=True, pass_fds=[listener.fileno()]
            )
        self.launcher = self.folder / "python"
        for path in (self.launcher, self.folder / "polyreme"):
            path.write_text(_LAUNCHER.format(python=sys.executable, address=str(address), forked=FORKED))
            path.chmod(0o700)
        atexit.register(self._close)

    def ask(self, order: Mapping[str, object], files: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], files)
            return int(self._socket.recv(64))

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # dying forks may still write


_parent = functools.cache(_Parent)
