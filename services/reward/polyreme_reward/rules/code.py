"""Runs programs against tests. Used in worker processes only.

Invariant: a failure of the program scores 0, and any other failure is an error. Expected values are compared here and never reach
the program.
"""

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from polyreme.isolation.sandbox.modes import choose
from polyreme.isolation.sandbox.program import Limits, Mode, SandboxError
from polyreme.isolation.sandbox.run import check, run
from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules.fences import program_of
from polyreme_reward.rules.response import answer_text

Test = Callable[[str, Mode, Limits], bool]
"""Takes a program's text and returns whether the program passes."""

_NOTES = {Mode.NONE: "unsafe: programs are not isolated"}


def code(
    partial: bool = False,
    timeout: Annotated[float, Field(gt=0)] = 4.0,
    memory_mib: Annotated[int, Field(ge=32)] = 512,
    unsafe: bool = False,
) -> Callable[[Item], float]:
    """1 if the response's Python program passes every test of its row, else 0.

    The program is the last fenced block of Python that has code. Blocks of output or of other languages are not run. Without such
    a label it is the last block that can be a program, and without fences the whole response. Text in <think>...</think> does not
    count. The tests are the row's column `tests`, also as JSON, or the label as JSON, in one of three forms:

    - {"inputs": [...], "outputs": [...]} compares standard output line by line, ignoring white space at line ends.
    - With "fn_name" in addition, inputs are lists of arguments and outputs are the values that the function (or the method of
      `Solution`) must return. If each output is a list of one value, as in APPS, that value counts, too. Floats are compared to
      six digits. The names that LeetCode's editor imports are available (typing, collections, math and others).
    - A list of strings, such as "assert f(1) == 2", is executed after the program, one string at a time.

    Each test has its own sandbox with one process (threads but no forks), no network, no sockets, no files except Python's and a
    temporary directory, and no access to the service's memory, environment or processes. See `polyreme.isolation.sandbox`.

    A program cannot forge a result by what it writes or returns. Outputs and returned values come back as text and are compared
    here. A list of strings runs in a second sandbox, which asks the program's sandbox for values: built-in types, which are
    compared in the second sandbox, or objects, which can be used but equal nothing. If a test delegates a comparison to a
    function of the program, then the program decides. A test that passes one of its own functions to the program is an error.

    Args:
        partial: score the fraction of passed tests.
        timeout: wall-clock seconds per test, after which the test fails. reward.item_timeout must suffice for all tests.
        memory_mib: data memory per test, in MiB.
        unsafe: run programs without a sandbox when none works, instead of refusing to start. Only for trusted programs.
    """
    mode = choose(unsafe)
    limits = Limits(timeout, memory_mib)

    def score(item: Item) -> float:
        tests = _tests(item)
        answer = answer_text(item, None, None)
        if answer is None:  # the thought is not closed
            return 0.0
        program = program_of(answer)
        passed = 0
        for passes in tests:
            try:
                if passes(program, mode, limits):
                    passed += 1
                elif not partial:
                    return 0.0
            except SandboxError as error:
                raise RewardError(f"expected a sandbox ({mode}) for the program; found {error}") from None
        return passed / len(tests)

    score.note = _NOTES.get(mode, f"programs are isolated by {mode}")  # type: ignore[attr-defined]
    return score


def _tests(item: Item) -> Sequence[Test]:
    found = item.metadata.get("tests")
    text = item.label or "" if found is None else found
    if isinstance(text, str):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            if found is None:
                raise RewardError("expected tests: a column `tests` in the row, or the label as JSON; found neither") from None
    if isinstance(found, str):
        found = [found]
    if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
        return [_assertion(text) for text in found]
    if isinstance(found, dict):
        inputs, outputs, name = found.get("inputs"), found.get("outputs"), found.get("fn_name")
        if isinstance(inputs, list) and isinstance(outputs, list) and inputs and len(inputs) == len(outputs):
            if name is None and all(isinstance(text, str) for text in [*inputs, *outputs]):
                return [_script(given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
            if isinstance(name, str) and all(isinstance(arguments, list) for arguments in inputs):
                wrapped = all(isinstance(wanted, list) and len(wanted) == 1 for wanted in outputs)
                return [
                    _call(name, given, [wanted, *wanted] if wrapped else [wanted])
                    for given, wanted in zip(inputs, outputs, strict=True)
                ]
    raise RewardError(f"expected tests with equally many inputs and outputs, or a list of assertions; found {str(found)[:200]}")


def _script(given: str, wanted: str) -> Test:
    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def passes(program: str, mode: Mode, limits: Limits) -> bool:
        ended = run(mode, {"kind": "script", "program": program}, given, limits)
        return ended.well and lines(ended.stdout.decode("utf-8", "replace")) == lines(wanted)

    return passes


def _call(name: str, arguments: list[object], wanted: list[object]) -> Test:
    """A test of a function, which returns one of the values `wanted`."""
    given = json.dumps(arguments)

    def passes(program: str, mode: Mode, limits: Limits) -> bool:
        ended = run(mode, {"kind": "call", "program": program, "name": name, "arguments": given}, "", limits)
        try:
            return ended.well and any(_equal(json.loads(ended.result), each) for each in wanted)
        except (ValueError, RecursionError, OverflowError):  # no result, invalid JSON, or an integer that no float holds
            return False

    return passes


def _assertion(text: str) -> Test:
    def passes(program: str, mode: Mode, limits: Limits) -> bool:
        verdict = check(mode, program, text, limits)
        if verdict.startswith("error: "):
            raise RewardError(verdict.removeprefix("error: ")[:500])
        return verdict == "pass"

    return passes


def _equal(value: object, wanted: object) -> bool:
    """Equality of JSON values. Floats are compared to six digits, since the order of a sum may change the rest."""
    if isinstance(wanted, list) and isinstance(value, list):
        return len(wanted) == len(value) and all(map(_equal, value, wanted))
    if isinstance(wanted, dict) and isinstance(value, dict):
        return wanted.keys() == value.keys() and all(_equal(value[key], wanted[key]) for key in wanted)
    numbers = [each for each in (value, wanted) if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) == 2 and any(isinstance(each, float) for each in numbers):
        return math.isclose(*numbers, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == wanted)
