"""`polyreme` commands as processes that start in milliseconds: one process has imported what they import, and each command is its fork.

Invariant: a command has its own session, environment, directory and outputs, as one that a shell starts. What a command imports at start
is not tested with it.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MODULES = (
    "polyreme.cli.up",
    "polyreme.cli.config",
    "polyreme_trainer.checks",
    "polyreme_reward.server",
    "transformers.tokenization_utils_base",
)


@dataclass(frozen=True)
class Started:
    """A command that runs, or has run.

    Attributes:
        argv: its arguments.
        out, err: files of its outputs; the same file when they share one.
    """

    argv: tuple[str, ...]
    pid: int
    out: Path
    err: Path

    def wait(self) -> "subprocess.CompletedProcess[str]":
        """Waits for its end. Raises AssertionError when it has not ended after 300 s; it is killed then."""
        status = _parent().ended(self.pid)
        return subprocess.CompletedProcess(self.argv, status, self.out.read_text(), self.err.read_text())


def polyreme(*argv: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs `polyreme argv` to its end."""
    return start(*argv, cwd=cwd, together=False, **environment).wait()


def start(*argv: str, cwd: Path | None = None, together: bool = False, **environment: str) -> Started:
    """Starts `polyreme argv`. `together`: both outputs go to one file, in the order of writing. The variables of Polyreme are unset."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    return _parent().fork(argv, Path.cwd() if cwd is None else cwd, {**clean, "COLUMNS": "120", **environment}, together)


class _Parent:
    """This process's side of the parent of all commands. It ends with this process, and its commands end with it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="polyreme-commands-"))
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command, pipe = [sys.executable, __file__, *MODULES], subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=os.environ | one_thread, start_new_session=True
        )
        self._statuses: dict[int, int] = {}
        self._count = 0
        atexit.register(self._close)

    def fork(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], together: bool) -> Started:
        self._count += 1
        out = self._folder / f"{self._count}.out"
        err = out if together else self._folder / f"{self._count}.err"
        order = {"argv": list(argv), "cwd": str(cwd), "environment": dict(environment), "out": str(out), "err": str(err)}
        return Started(tuple(argv), self._ask(order), out, err)

    def ended(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def _ask(self, order: Mapping[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def _close(self) -> None:
        self._process.kill()
        self._process.communicate()


_parent = functools.cache(_Parent)


def _child(order: dict[str, object]) -> int:
    """What the fork does. Returns its exit status."""
    os.setsid()
    for name, target in (("out", 1), ("err", 2)):
        os.dup2(os.open(str(order[name]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), target)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(str(order["cwd"]))
    environment, argv = order["environment"], order["argv"]
    assert isinstance(environment, dict) and isinstance(argv, list)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["polyreme", *argv]
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy: the module is imported already
    try:
        runpy.run_module("polyreme", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def _wait(pid: int) -> int:
    """The exit status of a fork. It is killed after 300 s."""
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.alarm(300)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        signal.alarm(0)


def _main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a fork takes one thread along, this process has {threads}"
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(_wait(order["wait"]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            with suppress(BrokenPipeError):
                status = _child(order)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(pid, flush=True)


if __name__ == "__main__":
    _main()
