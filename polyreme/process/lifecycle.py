"""Child processes, signals and exit codes.

Invariant: every process that Polyreme starts has an owner that ends it and its whole process group. A child leads its own
session, so a terminal's Ctrl-C reaches only the foreground command, which drains its children in order. The kernel signals a
child whose owner dies, and ends it soon if it does not end itself, so a kill -9 leaves nothing behind.
"""

import asyncio
import atexit
import ctypes
import errno
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

import psutil  # type: ignore[import-untyped]

from polyreme.errors import PolyremeError

logger = logging.getLogger(__name__)

REAP_TIMEOUT = 30.0
"""Seconds for a killed process to disappear. A driver or a lost file system can hold it."""
OWNER_DIED = signal.SIGUSR1
"""Death signal of a service. Only the kernel sends it, so a service cannot take it for a request to drain. The kernel may send it
several times, since it does so for each thread of the owner that had the service as a child."""
GRACE_SECONDS = 5.0
"""For what a part of a service does when asked to end, such as to write its records. Less than the ten seconds of a container."""
EXIT_SECONDS = 20
"""The kernel ends a process this long after its owner's death, or `exit_on_signals`, has told it to exit."""
_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 64 << 10
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_A_PATH = (errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, death_signal: int = signal.SIGKILL) -> None:
    """Asks the kernel to send this process `death_signal` when its parent dies. Linux only; elsewhere it does nothing."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        if os.getppid() != parent_pid:  # the parent died before the request took effect
            os.kill(os.getpid(), death_signal)


def freeze_gc(collect: bool = True) -> None:
    """Makes the garbage collector ignore all existing objects. Call it when startup is complete.

    A process that has imported torch or vLLM keeps a million objects; each collection of them takes a third of a second.

    Args:
        collect: whether to look for garbage first. After imports there is little.
    """
    if collect:
        gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries check for leaks at exit


class Child:
    """A process with its own session and process group."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", log_path: Path | None) -> None:
        self.name, self.log_path, self._popen = name, log_path, popen
        self._group_ended = False

    @classmethod
    def spawn(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        death_signal: int = signal.SIGKILL,
    ) -> "Child":
        """Starts `argv`. Call it in the main thread, because the kernel ties `death_signal` to the forking thread.

        Args:
            name: for messages.
            argv: program and arguments.
            env: added to this process's environment.
            log_path: stdout and stderr are appended there; None: inherited.
            death_signal: the signal that the child gets when this process dies.
        """
        parent = os.getpid()
        with open(log_path, "ab") if log_path else nullcontext() as log:
            popen = subprocess.Popen(
                list(argv),
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent, death_signal),
            )
        return cls(name, popen, log_path)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Waits for the process's exit without a thread. Returns its status."""
        if self._popen.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            pidfd = os.pidfd_open(self.pid)
            loop.add_reader(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return self._popen.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to the process, not its group, if it still runs."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    async def gone(self, within: float) -> bool:
        """Whether the process ends within `within` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self.wait()
        return self._popen.poll() is not None

    async def stop(self, grace: float) -> None:
        """Sends TERM to the process, and after `grace` seconds KILL to its group."""
        self.signal(signal.SIGTERM)
        await self.gone(grace)
        self.kill()
        await self.reap()

    async def reap(self) -> None:
        """Waits until the killed process has disappeared, also when cancelled. Logs an error after REAP_TIMEOUT."""
        gone = asyncio.ensure_future(self.gone(REAP_TIMEOUT))
        try:
            await asyncio.shield(gone)
        except asyncio.CancelledError:
            await gone
            raise
        if not gone.result():
            logger.error("%s (pid %d) was killed but still exists", self.name, self.pid)

    def kill(self) -> None:
        """Sends KILL to the group, once after its leader has exited, since the group's number may be reused later."""
        if self._group_ended:
            return
        self._group_ended = self._popen.poll() is not None
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 15) -> str:
        """The end of the child's log."""
        return "" if self.log_path is None or not self.log_path.exists() else "\n".join(last_lines(self.log_path, lines))


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, or fewer if they are long."""
    with open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()[-count:]


def signal_name(number: int) -> str:
    """Such as SIGKILL. Signals of real time have no names."""
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def exec_again(environment: Mapping[str, str]) -> NoReturn:
    """Replaces this process by a new one with the same id, command and owner, which has no memory of it. Ends what it started."""
    for child in psutil.Process().children():
        child.kill()
        child.wait(REAP_TIMEOUT)
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        if int(number) > 2:  # libraries may have opened files that a new program inherits
            with suppress(OSError):  # the list itself
                os.set_inheritable(int(number), False)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environment))


class StopEvent(asyncio.Event):
    """Set when the process should end.

    Attributes:
        orphaned: set too, also later, when the process's owner has died. What the owner ran dies with it, perhaps Redis, so
            nothing can drain: the process has EXIT_SECONDS to remove what would outlive it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.orphaned = asyncio.Event()


def stop_event() -> StopEvent:
    """An event set by the first SIGTERM, SIGINT, SIGHUP or OWNER_DIED. A second SIGTERM or SIGINT raises KeyboardInterrupt, even
    at the same time. Later SIGHUPs do nothing: shell and kernel may each send one. An ignored SIGHUP (`nohup`) stays ignored.
    """
    event, loop = StopEvent(), asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)

    def on_signal(number: int) -> None:
        again = event.is_set()
        event.set()
        for each in numbers:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.default_int_handler)
        if again:
            signal.raise_signal(number)

    def on_owner_died() -> None:
        if not event.orphaned.is_set():
            signal.alarm(EXIT_SECONDS)  # without a handler it ends the process, whatever that waits for
            event.orphaned.set()
            event.set()

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(OWNER_DIED, on_owner_died)
    return event


@asynccontextmanager
async def until_set(event: asyncio.Event, grace: float = 0.0) -> AsyncIterator[None]:
    """Leaves the block `grace` seconds after `event` is set: what it waits for is cancelled, and the code after it goes on."""

    async def leave() -> None:
        await event.wait()
        block.reschedule(asyncio.get_running_loop().time() + grace)

    try:
        async with asyncio.timeout(None) as block:
            leaving = asyncio.create_task(leave())
            try:
                yield
            finally:
                leaving.cancel()
    except TimeoutError as error:
        if not (block.expired() and isinstance(error.__cause__, asyncio.CancelledError)):  # raised in the block
            raise


def exit_at_once_on_sigterm() -> None:
    """Makes SIGTERM end the process at once with status 0, until `stop_event` replaces that: for the start of a server, which has
    nothing to finish or to remove yet, and where an exception in the middle of an import may become another one, or get lost.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def exit_on_signals() -> None:
    """Makes SIGTERM and OWNER_DIED raise SystemExit in the main thread. The kernel ends the process after EXIT_SECONDS, since an
    exception from a signal is lost where Python ignores exceptions, for example in `__del__`. For code without an event loop.
    """

    def on_signal(*_: object) -> None:
        signal.alarm(EXIT_SECONDS)
        sys.exit(128 + signal.SIGTERM)

    for number in (signal.SIGTERM, OWNER_DIED):
        signal.signal(number, on_signal)


def _of_files(error: OSError) -> PolyremeError:
    """What the user can do about an error of a disk, or of the rights to a file."""
    if error.errno in _OF_A_PATH:
        return PolyremeError(
            f"access to {error.filename}",
            error.strerror or str(error),
            "Check owner and mode of it and of the folders above it, or choose another path.",
        )
    return PolyremeError(
        "writable files",
        str(error),
        "Free disk space for output_dir and TMPDIR, or make them writable, then continue with --resume.",
    )


@contextmanager
def exit_on_error(program: str) -> Iterator[None]:
    """Turns an error that the user can act on into one message without a traceback, and the error's exit code."""
    try:
        yield
    except PolyremeError as error:
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in UNWRITABLE and not (error.errno in _OF_A_PATH and error.filename):
            raise
        print(f"{program}: error: {_of_files(error)}", file=sys.stderr, flush=True)
        sys.exit(PolyremeError.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
