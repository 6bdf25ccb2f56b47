"""The process that has imported common modules and forks: for tests over a socket pair, for launchers over a listening socket.

Invariant: a fork ends with this process. When a launcher has died, its fork ends before the next fork for a launcher starts.
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress

from polyreme.process.lifecycle import die_with_parent

_MESSAGE_BYTES = 1 << 18


def run_as_main(module: str, argv: Sequence[str]) -> int:
    """Runs a module as `python -m module argv` does. Returns the exit status."""
    sys.argv = [module, *argv]
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy warns that the module is already imported
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def import_alone(modules: Sequence[str]) -> None:
    """Imports modules, none of which may start a thread, since a fork has only one thread."""
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork takes one thread along, this process has {threads}"


def _child(order: dict[str, object], files: Sequence[int], parent: int) -> int:
    """Runs in the fork. Returns its exit status."""
    os.setsid()
    die_with_parent(parent)
    for source, target in zip((os.open(os.devnull, os.O_RDONLY), *files), (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    if order["terminal"]:
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    environment, argv, module = order["environment"], order["argv"], order["module"]
    assert isinstance(environment, dict) and isinstance(argv, list) and isinstance(module, str)
    os.chdir(str(order["cwd"]))
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = str(order["executable"])
    return run_as_main(module, argv)


def _end(status: int) -> None:
    """Ends this process as `multiprocessing` does: threads and exit handlers finish, but modules are not torn down."""
    with suppress(BrokenPipeError):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


class _Server:
    """The server: forks for the tests over `control`, and for launchers that connect to `listener`."""

    def __init__(self, control: socket.socket, listener: socket.socket) -> None:
        self._control, self._listener = control, listener
        self._launchers: dict[socket.socket, int] = {}  # pid of the fork
        self._forks: dict[int, socket.socket] = {}  # by pidfd

    def serve(self) -> None:
        """Serves until the tests' process has ended."""
        while True:
            watched: list[socket.socket | int] = [self._control, self._listener, *self._launchers, *self._forks]
            ready = select.select(watched, [], [])[0]
            for pidfd in self._forks.keys() & set(ready):
                self._finish(pidfd)
            self._end_orphans()
            if self._listener in ready:
                launcher, _ = self._listener.accept()
                message, files, _, _ = socket.recv_fds(launcher, _MESSAGE_BYTES, 2)
                self._end_orphans()  # a successor never runs beside its predecessor
                if message:
                    self._launchers[launcher] = pid = self._fork(json.loads(message), files)
                    self._forks[os.pidfd_open(pid)] = launcher
                    _say(launcher, pid)
                else:
                    launcher.close()
            if self._control in ready:
                message, files, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 2)
                if not message:
                    return
                order = json.loads(message)
                _say(self._control, _reaped(order["reap"]) if "reap" in order else self._fork(order, files))

    def _fork(self, order: dict[str, object], files: Sequence[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for each in (self._control, self._listener, *self._launchers, *self._forks.values()):
                    each.close()
                for pidfd in self._forks:
                    os.close(pidfd)
                status = _child(order, files, parent)
            finally:
                _end(status)
        for file in files:
            os.close(file)
        return pid

    def _finish(self, pidfd: int) -> None:
        launcher = self._forks.pop(pidfd)
        os.close(pidfd)
        _say(launcher, _reaped(self._launchers.pop(launcher)))
        launcher.close()

    def _end_orphans(self) -> None:
        """Ends the forks whose launcher has died. A launcher sends nothing after its order, so a readable socket means its end."""
        dead = select.select(list(self._launchers), [], [], 0)[0]
        for pidfd in [pidfd for pidfd, launcher in self._forks.items() if launcher in dead]:
            pid = self._launchers[self._forks[pidfd]]
            with suppress(ProcessLookupError):  # it does not lead a process group yet
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            self._finish(pidfd)


def _say(to: socket.socket, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended
        to.send(str(number).encode())


def _reaped(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _main(listener: str, *modules: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):  # also when the tests run under `nohup`
        signal.signal(number, signal.SIG_DFL)
    import_alone(modules)
    gc.freeze()  # or each fork's first collection of garbage copies the pages of every module
    _Server(socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(listener))).serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
