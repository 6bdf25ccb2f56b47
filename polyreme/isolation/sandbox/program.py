"""Starts one program in its sandbox and ends it.

Invariant: when its exit stack unwinds, the program has ended and all its resources are released. If the sandbox cannot be set up,
the constructor raises SandboxError or the program never counts as started.

The kernel limits memory (RLIMIT_DATA covers all memory that a program can have, see `seccomp`). The kernel does not limit
threads, page tables, nor the size of a directory that is not its own file system; the caller must poll `broken_limit`.
"""

import contextlib
import json
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import IO

from polyreme.isolation.sandbox import bubblewrap, landlock, seccomp
from polyreme.isolation.sandbox.disk import MOST_FILES, used
from polyreme.process.lifecycle import die_with_parent

_BOOT = "import marshal, sys; code, job = marshal.load(open(int(sys.argv[1]), 'rb')); exec(code)"
_INSIDE = str(Path(__file__).with_name("inside"))
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # otherwise numpy starts one thread per core
_MIB = 1 << 20


class Mode(StrEnum):
    """The isolation of a program."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    NONE = "none"


class SandboxError(Exception):
    """The sandbox could not be set up. The program has not run."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program: wall-clock seconds, MiB of data memory and of files, threads, bytes of output."""

    seconds: float
    memory_mib: int
    disk_mib: int = 32
    threads: int = 64
    output_bytes: int = 4 << 20


Pipes = tuple[tuple[IO[bytes], str], ...]
"""The outputs of a program, each with its name."""


class Program:
    """A started program with its pipes and its writable directory. `start` starts one."""

    def __init__(
        self,
        mode: Mode,
        limits: Limits,
        popen: "subprocess.Popen[bytes]",
        pipes: Pipes,
        files: tuple[IO[bytes], IO[bytes]],
        folder: str | None,
    ) -> None:
        self.mode, self.limits, self.popen, self.pipes, self._folder = mode, limits, popen, pipes, folder
        self._info, self._errors = files
        self.output = {"stdout": b"", "result": b""}

    @classmethod
    def start(
        cls, mode: Mode, job: Mapping[str, object], stdin: str, limits: Limits, channel: socket.socket | None, stack: ExitStack
    ) -> "Program":
        """Starts a program.

        Args:
            mode: the isolation.
            job: as described in `inside/child.py`, without `limits`, `paths` and `folder`.
            stdin: standard input of the program.
            limits: limits of the program.
            channel: an additional socket for the program, or None.
            stack: exit stack that ends the program and releases its resources.

        Raises:
            SandboxError: the sandbox could not be set up.
        """
        info, errors = _file(stack), _file(stack)
        folder: str | None = None
        data = marshal.dumps((_code(), {**job, "limits": _resources(limits), "paths": _packages(), "folder": _INSIDE}))
        stdout, result = _pipe(stack), _pipe(stack)
        with ExitStack() as starting:  # what this process needs no longer when the program has started
            stdout_end, result_end = (starting.enter_context(end) for _, end in (stdout, result))
            job_file, stdin_file = _file(starting, data), _file(starting, stdin.encode("utf-8", "surrogatepass"))
            passed = [job_file.fileno(), result_end.fileno(), channel.fileno() if channel is not None else -1]
            argv = [_PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, *map(str, passed)]
            kept = [fd for fd in passed if fd >= 0]
            preexec = None
            if mode is Mode.BUBBLEWRAP:
                filter_file = _file(starting, _filter())
                kept += [filter_file.fileno(), info.fileno()]
                wrap = bubblewrap.executable()
                if wrap is None:
                    raise SandboxError("bwrap is not installed")
                argv = bubblewrap.command(wrap, _readable(), limits.disk_mib * _MIB, *kept[-2:]) + argv
            else:
                made = stack.enter_context(tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True))
                folder = os.path.realpath(made)
                preexec = _prepare(mode, folder, starting)
            try:
                popen = subprocess.Popen(
                    argv,
                    stdin=stdin_file,
                    stdout=stdout_end,
                    stderr=errors,
                    cwd=folder or "/",
                    env=_ENVIRONMENT,
                    start_new_session=True,
                    pass_fds=kept,
                    preexec_fn=preexec,
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise SandboxError(str(error)) from None
        program = cls(mode, limits, popen, ((stdout[0], "stdout"), (result[0], "result")), (info, errors), folder)
        stack.callback(program.end)
        return program

    @property
    def started(self) -> bool:
        return bool(self.output["result"])

    def complaint(self) -> str:
        """The error output of a sandbox that did not start."""
        return os.pread(self._errors.fileno(), 1000, 0).decode("utf-8", "replace").strip() or "no error output"

    def take(self, pipe: IO[bytes], name: str) -> bool:
        """Reads available data of an output. Returns False at its end."""
        data = os.read(pipe.fileno(), 1 << 16)
        self.output[name] += data
        return bool(data)

    def drain(self) -> None:
        """Reads the rest of the outputs after the program has ended, even if other processes hold the other ends."""
        for pipe, name in self.pipes:
            while (
                len(self.output[name]) <= self.limits.output_bytes
                and select.select([pipe], [], [], 0)[0]
                and self.take(pipe, name)
            ):
                pass

    def broken_limit(self) -> str | None:
        """Name of a limit that the program exceeds and the kernel does not enforce, or None."""
        if self._folder is not None and self.mode is not Mode.NONE and used(self._folder, self.pid) > self.limits.disk_mib * _MIB:
            return "disk"
        if self.mode is Mode.BUBBLEWRAP:  # the file system limits bytes but not files
            with contextlib.suppress(OSError):  # it has ended
                files = os.statvfs(f"/proc/{self.pid}/root/tmp")
                if files.f_files - files.f_ffree > MOST_FILES:
                    return "disk"
        with contextlib.suppress(OSError):  # it has ended
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines())
            if int(fields["Threads"]) > self.limits.threads:
                return "threads"
            kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap", "VmPTE") if name in fields)
            if kib > (self.limits.memory_mib + self.limits.disk_mib) << 10:
                return "memory"
        return None

    @property
    def pid(self) -> int:
        """The program's process id, as seen from here, once it has started."""
        if self.mode is Mode.BUBBLEWRAP:
            with contextlib.suppress(ValueError, KeyError):  # not written yet
                return int(json.loads(os.pread(self._info.fileno(), 1000, 0))["child-pid"])
        return self.popen.pid

    def end(self) -> int:
        """Kills the program unless it has ended. Returns its exit status."""
        if self.popen.poll() is None:
            inner = self.pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            if inner != self.popen.pid:
                with contextlib.suppress(ChildProcessError):  # a child only if this process adopts orphans
                    os.waitpid(inner, 0)
        elif self.mode is Mode.NONE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.returncode


@cache
def _code() -> types.CodeType:
    """The compiled code that starts in the sandbox."""
    return compile(Path(_INSIDE, "child.py").read_text(), "child.py", "exec", dont_inherit=True)


def _file(stack: ExitStack, data: bytes = b"") -> IO[bytes]:
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 the stack closes it
    file.write(data)
    file.seek(0)
    return file


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """The read end and the write end. The stack closes the read end, and the caller the other one."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", buffering=0)), open(write, "wb", buffering=0)


def _resources(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": int(limits.seconds) + 2,
        "RLIMIT_DATA": limits.memory_mib * _MIB,
        "RLIMIT_FSIZE": limits.disk_mib * _MIB,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 1,  # no core file; unlike 0, this also prevents piping it to a handler
    }


@cache
def _filter() -> bytes:
    return seccomp.filter_of(attributes=True)


@cache
def _packages() -> list[str]:
    """Directories of this environment's packages, which programs may import."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(os.path.realpath(paths[name]) for name in ("purelib", "platlib")))


@cache
def _readable() -> list[str]:
    """Readable paths in addition to the system's: Python, its packages, the code of `inside`."""
    python = [os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(_PYTHON))]
    return [path for path in dict.fromkeys([*python, *_packages(), _INSIDE]) if path != "/usr"]


def _prepare(mode: Mode, folder: str, stack: ExitStack) -> Callable[[], None]:
    """The function that confines a program without namespaces between fork and exec."""
    parent = os.getpid()
    if mode is Mode.NONE:
        return lambda: die_with_parent(parent)
    try:
        rules = landlock.Rules([*bubblewrap.SYSTEM, *_readable()], [folder, *bubblewrap.DEVICES])
    except OSError as error:
        raise SandboxError(f"Landlock: {error}") from None
    stack.callback(rules.close)

    def confine() -> None:
        die_with_parent(parent)
        landlock.confine(rules, seccomp.filter_of(attributes=False, pid=os.getpid()))

    return confine
