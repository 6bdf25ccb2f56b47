"""One program, started in a sandbox and watched until its end. Invariant: a program that was started has ended when `run` or `check` returns,
with everything it kept; one whose sandbox could not be set up raises SandboxError and is never a failed test.

The time limit counts from the first byte that the sandbox's own code sends, so that a slow start takes nothing away from the program.
Memory is limited by the kernel (RLIMIT_DATA counts all that a program may have, see `seccomp`); what no limit of the kernel counts (threads,
and the directory where there is no file system of its own) is looked at every few hundredths of a second.
"""

import contextlib
import json
import marshal
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_START_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_FILES = 256
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


@dataclass(frozen=True)
class Ended:
    """How a program ended: `over` names the limit it broke, if any; `status` is its exit status, negative or beyond 128 for a signal."""

    over: str | None
    status: int
    stdout: bytes
    result: bytes

    @property
    def well(self) -> bool:
        return self.over is None and self.status == 0


def run(mode: Mode, job: Mapping[str, Any], stdin: str, limits: Limits) -> Ended:
    """Runs one program.

    Args:
        mode: what isolates it.
        job: as `inside/child.py` describes it, without `limits`, `paths` and `folder`.
        stdin: its standard input.
        limits: beyond them it is ended.

    Raises:
        SandboxError: it could not be started.
    """
    with ExitStack() as stack:
        return _watch([_Program(mode, job, stdin, limits, None, stack)], limits)


def check(mode: Mode, program: str, test: str, limits: Limits) -> str:
    """Runs a test's code in one sandbox against a program in another. Returns "pass", "fail", or "error: " and why it cannot be judged.

    Raises:
        SandboxError: one of the two could not be started.
    """
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            judge = _Program(mode, {"kind": "check", "test": test}, "", limits, ours, stack)
            judged = _Program(mode, {"kind": "serve", "program": program}, "", limits, theirs, stack)
        ended = _watch([judge, judged], limits)
        verdict = ended.result.decode("utf-8", "replace")
        return verdict if ended.well and verdict else "fail"


class _Program:
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
                env={},
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
        self._errors.seek(0)
        return self._errors.read(1000).decode("utf-8", "replace").strip() or "it said nothing"

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
            self._info.seek(0)
            with contextlib.suppress(ValueError, KeyError):
                return int(json.loads(self._info.read())["child-pid"])
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


def _watch(programs: Sequence[_Program], limits: Limits) -> Ended:
    """Waits for the first program's end, or for a limit that any of them breaks."""
    first = programs[0]
    start_by, look_at = time.monotonic() + _START_SECONDS, time.monotonic() + _LOOK_SECONDS
    end_by: float | None = None
    over: str | None = None
    with selectors.DefaultSelector() as selector, _pidfd(first.popen.pid) as ended:
        selector.register(ended, selectors.EVENT_READ)
        for program in programs:
            for pipe, name in program.pipes:
                selector.register(pipe, selectors.EVENT_READ, (program, name))
        while over is None:
            ready = [key for key, _ in selector.select(_LOOK_SECONDS)]
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
            if over is None and now >= look_at:
                look_at = now + _LOOK_SECONDS
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


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


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
        "RLIMIT_CORE": 0,
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
