"""Python processes that start in milliseconds: one process has imported what they import, and each of them is its fork.

Invariant: a fork has its own session, environment, directory and outputs, as a process that a shell starts. What a module imports at start
is not tested with it.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from polyreme.process.lifecycle import Child, die_with_parent

MODULES = (
    "polyreme.cli.audit",
    "polyreme.cli.config",
    "polyreme.cli.up",
    "polyreme_reward.command",
    "polyreme_reward.server",
    "polyreme_rollout.testing.simulated_replicas",
    "polyreme_trainer.checks",
    "polyreme_trainer.testing.simulation",
    "transformers.tokenization_utils_base",
)
_MESSAGE_BYTES = 1 << 18
_DEADLINE = 300.0  # seconds


class Fork:
    """A process that the parent has forked. It has what `Child` and tests use of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
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
        if self.returncode is None and select.select([self._pidfd], [], [], seconds)[0]:
            os.close(self._pidfd)
            self.returncode = _parent().ask({"reap": self.pid})
        return self.returncode


@dataclass(frozen=True)
class Started:
    """A command that runs, or has run.

    Attributes:
        argv: its arguments.
        out, err: files of its outputs; the same file when they share one.
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
    """Starts `polyreme argv`. `together`: both outputs go to one file, in the order of writing. The variables of Polyreme are unset."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    folder = Path(tempfile.mkdtemp(prefix="command-", dir=_parent().folder))
    out, err = folder / "out", folder / ("out" if together else "err")
    with open(out, "ab") as stdout, open(err, "ab") as stderr:
        outputs = stdout.fileno(), stderr.fileno()
        process = fork("polyreme", argv, {**clean, "COLUMNS": "120", **environment}, outputs, cwd)
    return Started(argv, process, out, err)


def spawn(name: str, module: str, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """As `Child.spawn`: starts `python -m module argv`. `environment` is added to this process's; what it writes is appended to `log`."""
    with open(log, "ab") as file:
        process = fork(module, argv, {**os.environ, **environment}, (file.fileno(), file.fileno()))
    return Child(name, cast("subprocess.Popen[bytes]", process), log)


def fork(
    module: str,
    argv: Sequence[str],
    environment: Mapping[str, str],
    outputs: tuple[int, int],
    cwd: Path | None = None,
    executable: str = sys.executable,
) -> Fork:
    """Starts `python -m module argv` with nothing but `environment`.

    Args:
        outputs: file descriptors for its stdout and stderr.
        cwd: its working directory; this process's by default.
        executable: the interpreter that it finds as its own.
    """
    order = {
        "module": module,
        "argv": list(argv),
        "cwd": str(cwd or Path.cwd()),
        "environment": dict(environment),
        "executable": executable,
    }
    return Fork([executable, "-m", module, *argv], _parent().ask(order, outputs))


class _Parent:
    """This process's side of the parent of all forks. It ends with this process, and the forks end with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polyreme-commands-"))
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *MODULES], stdin=theirs.fileno(), env=os.environ | one_thread, start_new_session=True
            )
        atexit.register(self._close)

    def ask(self, order: Mapping[str, object], files: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(order).encode()], files)
            return int(self._socket.recv(64))

    def _close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


_parent = functools.cache(_Parent)


def _child(order: dict[str, object], files: Sequence[int], parent: int) -> int:
    """What the fork does. Returns its exit status."""
    os.setsid()
    die_with_parent(parent)
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *files), (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    environment, argv, module = order["environment"], order["argv"], order["module"]
    assert isinstance(environment, dict) and isinstance(argv, list) and isinstance(module, str)
    os.chdir(str(order["cwd"]))
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = str(order["executable"])
    sys.argv = [module, *argv]
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy: the module is imported already
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _end(status: int) -> None:
    """Ends this process as `multiprocessing` ends its own: threads and exit handlers run to their end, modules are not taken apart."""
    with suppress(BrokenPipeError):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork takes one thread along, this process has {threads}"
    control, parent = socket.socket(fileno=os.dup(0)), os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2)
        if not message:
            return
        order = json.loads(message)
        if "reap" in order:
            control.send(str(os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            status = 1
            try:
                status = _child(order, files, parent)
            finally:
                _end(status)
        for file in files:
            os.close(file)
        control.send(str(pid).encode())


if __name__ == "__main__":
    _main()
