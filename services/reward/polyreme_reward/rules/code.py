"""Programs tried on tests. Runs in worker processes only. Invariant: a program's own failure scores 0; whatever else goes wrong is an error;
expected values are compared here and never reach the program."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field

from polyreme_reward.items import Item, RewardError
from polyreme_reward.sandbox.modes import choose
from polyreme_reward.sandbox.program import Limits, Mode, SandboxError
from polyreme_reward.sandbox.run import check, run

Test = Callable[[str, Mode, Limits], bool]
"""Whether a program passes; it gets the program's text."""

_NOTES = {Mode.NONE: "programs are not isolated: unsafe"}


def code(
    partial: bool = False,
    timeout: Annotated[float, Field(gt=0)] = 4.0,
    memory_mib: Annotated[int, Field(ge=32)] = 512,
    unsafe: bool = False,
) -> Callable[[Item], float]:
    """1 if the response's Python program passes every test of its row; else 0.

    The program is the last fenced code block of the response, or the whole response. The tests are the row's column `tests`, or the
    label as JSON: {"inputs": [...], "outputs": [...]} compares standard output, line by line without white space at line ends;
    with "fn_name" beside them, inputs are lists of arguments and outputs the values that function (or method of `Solution`) must
    return, numbers with a fraction to six digits, and the program finds what LeetCode's editor imports (typing, collections, math
    and their like); a list of strings is executed behind the program, one by one, such as "assert f(1) == 2".

    Each test has a sandbox of its own: one process (no forks, threads only), no network, no sockets, no files but Python's and a
    temporary directory, nothing of the service's memory, environment or processes. See `polyreme_reward.sandbox`.

    Nothing that a program writes or returns can make up a result. Outputs and returned values come back as text and are compared
    here. A list of strings runs in a second sandbox, which asks the program's own for values: built-in types, which are compared there, or
    objects, which can be used and are equal to nothing. So a test decides by what it does itself: if it leaves a comparison to a
    function of the program, the program decides. A test that hands the program a function of its own is an error.

    Args:
        partial: score the share of passed tests instead.
        timeout: seconds of wall clock for one test; beyond them the test has failed. reward.item_timeout must leave room for all.
        memory_mib: data memory of a test.
        unsafe: run programs without a sandbox where none works, instead of refusing to start. For programs that cannot be hostile.
    """
    mode = choose(unsafe)
    limits = Limits(timeout, memory_mib)

    def score(item: Item) -> float:
        tests = _tests(item)
        program = program_of(item.response)
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


def program_of(response: str) -> str:
    """The last fenced code block, without its language; the whole text when there is none."""
    parts = response.split("```")
    if len(parts) < 3:
        return response
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, newline, rest = block.partition("\n")
    return rest if newline and not first.strip().count(" ") else block


def _tests(item: Item) -> Sequence[Test]:
    found = item.metadata.get("tests")
    if found is None:
        try:
            found = json.loads(item.label)
        except (ValueError, RecursionError):
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
                return [_call(name, given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    raise RewardError(f"expected tests with inputs and outputs of one length, or a list of assertions; found {str(found)[:200]}")


def _script(given: str, wanted: str) -> Test:
    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def passes(program: str, mode: Mode, limits: Limits) -> bool:
        ended = run(mode, {"kind": "script", "program": program}, given, limits)
        return ended.well and lines(ended.stdout.decode("utf-8", "replace")) == lines(wanted)

    return passes


def _call(name: str, arguments: list[Any], wanted: Any) -> Test:
    given = json.dumps(arguments)

    def passes(program: str, mode: Mode, limits: Limits) -> bool:
        ended = run(mode, {"kind": "call", "program": program, "name": name, "arguments": given}, "", limits)
        try:
            return ended.well and _equal(json.loads(ended.result), wanted)
        except (ValueError, RecursionError):  # nothing came, or no JSON
            return False

    return passes


def _assertion(text: str) -> Test:
    def passes(program: str, mode: Mode, limits: Limits) -> bool:
        verdict = check(mode, program, text, limits)
        if verdict.startswith("error: "):
            raise RewardError(verdict.removeprefix("error: ")[:500])
        return verdict == "pass"

    return passes


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
