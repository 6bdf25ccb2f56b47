"""Programs tried on tests. Runs in worker processes only. Invariant: a program's own failure scores 0; whatever else goes wrong is
an error; nothing that a program writes outlives its test."""

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from polyreme_reward.items import Item, RewardError

_CHILD = str(Path(__file__).with_name("code_child.py"))
_OUTPUT_BYTES = 4 << 20
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass(frozen=True)
class Trial:
    """One test: files beside the program, its standard input, and what tells success from its stdout and its returned value."""

    files: dict[str, str]
    stdin: str
    passed: Callable[[str, Any], bool]


def code(
    partial: bool = False,
    timeout: Annotated[float, Field(gt=0)] = 4.0,
    memory_mib: Annotated[int, Field(ge=32)] = 512,
) -> Callable[[Item], float]:
    """1 if the response's Python program passes every test of its row; else 0.

    The program is the last fenced code block of the response, or the whole response. The tests are the row's column `tests`, or the
    label as JSON: {"inputs": [...], "outputs": [...]} compares standard output, line by line without white space at line ends;
    with "fn_name" beside them, inputs are lists of arguments and outputs the values that function (or method of `Solution`) must
    return, numbers with a fraction to six digits, and the program finds what LeetCode's editor imports (typing, collections, math
    and their like); a list of strings is executed behind the program, one by one, such as "assert f(1) == 2".

    Each test has a process of its own: resource limits, an empty environment, a directory of its own, and, where the kernel allows
    it, no network. That contains accidents. It does not contain an attacker: the program runs as this user, can read whatever
    this user can read, can leave its directory, and can forge the success of tests of the third kind. Against hostile programs
    run the reward service itself in a container or virtual machine without secrets and without network.

    Args:
        partial: score the share of passed tests instead.
        timeout: seconds of wall clock for one test; beyond them the test has failed. reward.item_timeout must leave room for all.
        memory_mib: data memory of a test.
    """

    def score(item: Item) -> float:
        tests = _tests(item)
        program = program_of(item.response)
        passed = 0
        for test in tests:
            if _passes(program, test, timeout, memory_mib):
                passed += 1
            elif not partial:
                return 0.0
        return passed / len(tests)

    return score


def program_of(response: str) -> str:
    """The last fenced code block, without its language; the whole text when there is none."""
    parts = response.split("```")
    if len(parts) < 3:
        return response
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, newline, rest = block.partition("\n")
    return rest if newline and not first.strip().count(" ") else block


def _tests(item: Item) -> Sequence[Trial]:
    found = item.metadata.get("tests")
    if found is None:
        try:
            found = json.loads(item.label)
        except (ValueError, RecursionError):
            raise RewardError("expected tests: a column `tests` in the row, or the label as JSON; found neither") from None
    if isinstance(found, str):
        found = [found]
    if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
        return [Trial({"check.py": text}, "", lambda _, value: value is None) for text in found]
    if isinstance(found, dict):
        inputs, outputs, name = found.get("inputs"), found.get("outputs"), found.get("fn_name")
        if isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs):
            if name is None and all(isinstance(text, str) for text in [*inputs, *outputs]):
                return [_script(given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
            if isinstance(name, str) and all(isinstance(arguments, list) for arguments in inputs):
                return [_call(name, given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    raise RewardError(f"expected tests with inputs and outputs of one length, or a list of assertions; found {str(found)[:200]}")


def _script(given: str, wanted: str) -> Trial:
    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    return Trial({}, given, lambda stdout, _: lines(stdout) == lines(wanted))


def _call(name: str, arguments: list[Any], wanted: Any) -> Trial:
    return Trial({"call.json": json.dumps({"name": name, "arguments": arguments})}, "", lambda _, value: _equal(value, wanted))


def _equal(value: Any, wanted: Any) -> bool:
    """Equality of JSON values; of numbers with a fraction to six digits, which the order of a sum may change."""
    if isinstance(wanted, list) and isinstance(value, list):
        return len(wanted) == len(value) and all(map(_equal, value, wanted))
    if isinstance(wanted, dict) and isinstance(value, dict):
        return wanted.keys() == value.keys() and all(_equal(value[key], wanted[key]) for key in wanted)
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (value, wanted))
    if numbers and (isinstance(value, float) or isinstance(wanted, float)):
        return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == wanted)


class _Nothing:
    """What a program returned that did not get that far; equal to nothing."""


def _passes(program: str, test: Trial, timeout: float, memory_mib: int) -> bool:
    """Runs the program on one test in a directory that goes with it."""
    with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as folder:
        work = Path(folder, "work")
        work.mkdir()
        for name, text in {"program.py": program, **test.files}.items():
            (work / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        Path(folder, "stdin").write_text(test.stdin, encoding="utf-8", errors="surrogatepass")
        with (
            open(f"{folder}/stdin", "rb") as stdin,
            open(f"{folder}/stdout", "w+b") as stdout,
            open(f"{folder}/value", "w+b") as value,
        ):
            child = subprocess.Popen(
                [sys.executable, "-I", "-B", "-X", "utf8", _CHILD],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=work,
                env={},
                start_new_session=True,
                preexec_fn=lambda: _confine(value.fileno(), timeout, memory_mib),
                close_fds=False,  # _confine does, all but the three and descriptor 3
            )
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            stdout.seek(0)
            value.seek(0)
            return code == 0 and test.passed(
                stdout.read(_OUTPUT_BYTES).decode("utf-8", "replace"), _loaded(value.read(_OUTPUT_BYTES))
            )


def _loaded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return _Nothing()


def _confine(value_fd: int, timeout: float, memory_mib: int) -> None:
    """In the child, before the program: limits, no network where that is possible, no descriptors but 0 to 3."""
    os.dup2(value_fd, 3)
    os.closerange(4, 1 << 16)
    seconds = int(timeout) + 1
    for what, limit in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_DATA, memory_mib << 20),
        (resource.RLIMIT_FSIZE, _OUTPUT_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
