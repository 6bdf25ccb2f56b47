"""The process that owns the workers: it forks them, ends them, and cleans up after them.

Invariant: after it has ended, no process that a worker started is running and none of the workers' temporary files exists. It has
one thread, runs no plugin code, adopts orphans (PR_SET_CHILD_SUBREAPER), and ends when its control socket closes.

Messages on the control socket (SOCK_SEQPACKET, JSON): receives {"spawn": id} with the worker's socket, and {"kill": id}; sends
{"forked": id} and {"exited": id, "reason": text}. Usage: `python -m polyreme.isolation.keeper FD FOLDER WORKER MODULE...`. FOLDER
has one folder for each worker's temporary files and is removed at the end. WORKER is the module whose `main(socket)` is a worker;
it returns the exit status. It and the other modules are imported before the first fork.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import psutil  # type: ignore[import-untyped]

from polyreme.isolation.privacy import refuse_inspection
from polyreme.process.lifecycle import die_with_parent, signal_name

_MESSAGE_BYTES = 1 << 12
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants. Does nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Keeper:
    """The main loop of the process."""

    def __init__(self, control: socket.socket, folder: str, worker: Callable[[socket.socket], int]) -> None:
        self._control, self._folder, self._worker = control, folder, worker
        self._workers: dict[int, int] = {}  # pid -> id
        self._me = psutil.Process()

    def run(self) -> None:
        """Serves until the control socket closes or SIGTERM arrives, then ends every descendant."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        stopping: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        readable = select.poll()  # select.select would not accept descriptors above 1023, which a busy server passes on
        for file in (self._control.fileno(), wake_read):
            readable.register(file, select.POLLIN)
        try:
            while not stopping:
                ready = {file for file, _ in readable.poll()}
                if wake_read in ready:
                    with suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._reap()
                if self._control.fileno() in ready and not self._command():
                    break
        finally:
            self._end()

    def _command(self) -> bool:
        """Handles one message. Returns False when the socket has closed."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        except ConnectionError:  # closed while sent messages were unread
            return False
        if not data:
            return False
        message = json.loads(data)
        if "kill" in message:
            for pid in [pid for pid, name in self._workers.items() if name == message["kill"]]:
                _kill(pid)
        else:
            self._fork(message["spawn"], fds[0])
        return True

    def _fork(self, name: int, fd: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(parent, f"{self._folder}/{name}", fd)
        os.close(fd)
        self._workers[pid] = name
        with suppress(ConnectionError):
            self._control.send(json.dumps({"forked": name}).encode())

    def _become_worker(self, parent: int, folder: str, fd: int) -> NoReturn:
        status = 70
        try:
            os.setsid()
            die_with_parent(parent)
            adopt_orphans()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.mkdir(folder)
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            os.closerange(3, fd)
            os.closerange(fd + 1, 1 << 16)
            status = self._worker(socket.socket(fileno=fd))
        finally:
            os._exit(status)

    def _reap(self) -> None:
        ended: list[int] = []
        orphans = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            orphans = True
            name = self._workers.pop(pid, None)
            if name is not None:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                ended.append(name)
                with suppress(ConnectionError):
                    self._control.send(json.dumps({"exited": name, "reason": _reason(status)}).encode())
        if orphans:
            self._sweep()
        for name in ended:
            shutil.rmtree(f"{self._folder}/{name}", ignore_errors=True)

    def _sweep(self) -> bool:
        """Kills adopted orphans, whose worker has ended. Their children are adopted next. Returns whether there were any."""
        orphans = [child.pid for child in self._me.children() if child.pid not in self._workers]
        for pid in orphans:
            _kill(pid)
        return bool(orphans)

    def _end(self) -> None:
        for pid in self._workers:
            _kill(pid)
        with suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, 0)
                self._workers.pop(pid, None)
                self._sweep()
        shutil.rmtree(self._folder, ignore_errors=True)


def _kill(pid: int) -> None:
    """Kills a child and its process group. The child is not reaped yet, so its pid is still valid."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exited with status {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    refuse_inspection()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads, which do not survive a fork
    worker = importlib.import_module(sys.argv[3])
    for module in sys.argv[4:]:
        with suppress(ImportError):  # the worker that needs the module reports the error
            importlib.import_module(module)
    gc.freeze()  # keeps these pages shared with the forks
    Keeper(control, sys.argv[2], worker.main).run()
    os._exit(0)  # skips the slow cleanup of preloaded libraries


if __name__ == "__main__":
    main()
