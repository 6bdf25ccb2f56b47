"""One program in its sandbox, from start to end. Invariant: when the stack that it was given unwinds, the program has ended and nothing that it
kept is left; one whose sandbox could not be set up raises SandboxError or never counts as started.

Memory is limited by the kernel (RLIMIT_DATA counts all that a program may have, see `seccomp`). What no limit of the kernel counts (threads, and
the directory where there is no file system of its own) is for the caller to look at, with `broken_limit`.
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
from typing import IO, Any

from polyreme.process.lifecycle import die_with_parent
from polyreme_reward.sandbox import bubblewrap, landlock, seccomp

_BOOT = "import marshal, sys; code, job = marshal.load(open(int(sys.argv[1]), 'rb')); exec(code)"
_INSIDE = str(Path(__file__).with_name("inside"))
_PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # else numpy starts a thread for each core
_FILES = 1024
_MIB = 1 << 20


class Mode(StrEnum):
    """What keeps a program in."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    NONE = "none"


class SandboxError(Exception):
    """The sandbox could not be set up; the program has not run."""


@dataclass(frozen=True)
class Limits:
    """What one program may take: wall-clock seconds, MiB of data memory and of files, threads, bytes of output."""

    seconds: float
    memory_mib: int
    disk_mib: int = 32
    threads: int = 64
    output_bytes: int = 4 << 20


class Program:
    """A started program, its pipes, and where it may write.

    Args:
        channel: a socket for it, beside the usual ones.
        stack: ends the program and closes what belongs to it.
    """

    def __init__(
        self, mode: Mode, job: Mapping[str, Any], stdin: str, limits: Limits, channel: socket.socket | None, stack: ExitStack
    ) -> None:
        self.mode, self.limits = mode, limits
        self.output = {"stdout": b"", "result": b""}
        self._info, self._errors = _file(stack), _file(stack)
        self._folder: str | None = None
        data = marshal.dumps((_code(), {**job, "limits": _resources(limits), "paths": _packages(), "folder": _INSIDE}))
        job_file, stdin_file = _file(stack, data), _file(stack, stdin.encode("utf-8", "surrogatepass"))
        stdout, stdout_end = _pipe(stack)
        result, result_end = _pipe(stack)
        self.pipes = ((stdout, "stdout"), (result, "result"))
        passed = [job_file.fileno(), result_end.fileno(), channel.fileno() if channel is not None else -1]
        argv = [_PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, *map(str, passed)]
        kept = [fd for fd in passed if fd >= 0]
        preexec = None
        if mode is Mode.BUBBLEWRAP:
            filter_file = _file(stack, _filter())
            kept += [filter_file.fileno(), self._info.fileno()]
            wrap = bubblewrap.executable()
            if wrap is None:
                raise SandboxError("there is no bwrap")
            argv = bubblewrap.command(wrap, _readable(), limits.disk_mib * _MIB, *kept[-2:]) + argv
        else:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True))
            preexec = _prepare(mode, self._folder, stack)
        try:
            self.popen = subprocess.Popen(
                argv,
                stdin=stdin_file,
                stdout=stdout_end,
                stderr=self._errors,
                cwd=self._folder or "/",
                env=_ENVIRONMENT,
                start_new_session=True,
                pass_fds=kept,
                preexec_fn=preexec,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(str(error)) from None
        finally:
            stdout_end.close()
            result_end.close()
        stack.callback(self.end)

    @property
    def started(self) -> bool:
        return bool(self.output["result"])

    def complaint(self) -> str:
        """What the sandbox itself said on why it did not start."""
        return os.pread(self._errors.fileno(), 1000, 0).decode("utf-8", "replace").strip() or "it said nothing"

    def take(self, pipe: IO[bytes], name: str) -> bool:
        """Takes what there is of an output. False at its end."""
        data = os.read(pipe.fileno(), 1 << 16)
        self.output[name] += data
        return bool(data)

    def drain(self) -> None:
        """Takes what is left of the outputs when the program has ended, whoever else still holds the other ends."""
        for pipe, name in self.pipes:
            while (
                len(self.output[name]) <= self.limits.output_bytes
                and select.select([pipe], [], [], 0)[0]
                and self.take(pipe, name)
            ):
                pass

    def broken_limit(self) -> str | None:
        """The limit that the program is found beyond, of those that the kernel does not enforce."""
        if self._folder is not None and self.mode is not Mode.NONE and _usage(self._folder) > self.limits.disk_mib * _MIB:
            return "disk"
        if self.mode is Mode.BUBBLEWRAP:  # bytes have a limit there, files do not
            with contextlib.suppress(OSError):  # it has ended
                files = os.statvfs(f"/proc/{self._pid()}/root/tmp")
                if files.f_files - files.f_ffree > _FILES:
                    return "disk"
        with contextlib.suppress(OSError):  # it has ended
            fields = dict(line.split(":", 1) for line in Path(f"/proc/{self._pid()}/status").read_text().splitlines())
            if int(fields["Threads"]) > self.limits.threads:
                return "threads"
            kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in fields)
            if kib > (self.limits.memory_mib + self.limits.disk_mib) << 10:
                return "memory"
        return None

    def _pid(self) -> int:
        """The program's process id, as seen from here."""
        if self.mode is Mode.BUBBLEWRAP:
            with contextlib.suppress(ValueError, KeyError):  # it has not come so far
                return int(json.loads(os.pread(self._info.fileno(), 1000, 0))["child-pid"])
        return self.popen.pid

    def end(self) -> int:
        """Ends the program, if it has not ended. Returns its exit status."""
        if self.popen.poll() is None:
            inner = self._pid()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()
            if inner != self.popen.pid:
                with contextlib.suppress(ChildProcessError):  # ours only where orphans come to us
                    os.waitpid(inner, 0)
        elif self.mode is Mode.NONE:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        return self.popen.returncode


@cache
def _code() -> types.CodeType:
    """The code that starts in the sandbox."""
    return compile(Path(_INSIDE, "child.py").read_text(), "child.py", "exec", dont_inherit=True)


def _file(stack: ExitStack, data: bytes = b"") -> IO[bytes]:
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 the stack closes it
    file.write(data)
    file.seek(0)
    return file


def _pipe(stack: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """The ends to read and to write; closing the second is the caller's, who gives it away."""
    read, write = os.pipe()
    return stack.enter_context(open(read, "rb", buffering=0)), open(write, "wb", buffering=0)


def _usage(folder: str) -> int:
    """Bytes of the files in a directory that has no others below it; more files than a program may have count as endless."""
    blocks = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count > _FILES:
                return sys.maxsize
            with contextlib.suppress(FileNotFoundError):
                blocks += entry.stat(follow_symlinks=False).st_blocks
    return blocks * 512


def _resources(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": int(limits.seconds) + 2,
        "RLIMIT_DATA": limits.memory_mib * _MIB,
        "RLIMIT_FSIZE": limits.disk_mib * _MIB,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 1,  # no core file, and unlike 0 no program that the kernel would give it to
    }


@cache
def _filter() -> bytes:
    return seccomp.filter_of(attributes=True)


@cache
def _packages() -> list[str]:
    """Where this environment's packages are, for programs to import."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(os.path.realpath(paths[name]) for name in ("purelib", "platlib")))


@cache
def _readable() -> list[str]:
    """What a program reads beside the system's files: Python, its packages, the code of `inside`."""
    python = [os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(_PYTHON))]
    return [path for path in dict.fromkeys([*python, *_packages(), _INSIDE]) if path != "/usr"]


def _prepare(mode: Mode, folder: str, stack: ExitStack) -> Callable[[], None]:
    """What a program without namespaces does between fork and exec."""
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
