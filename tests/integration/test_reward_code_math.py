"""The built-in rewards that need worker processes: `code` and `math`."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from polyreme_reward.items import Item
from support.processes import descendants
from support.rewards import scoring, summary

ECHO_SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
TWICE = {"fn_name": "twice", "inputs": [[2], [[1]]], "outputs": [4, [1, 1]]}


def program(text: str, tests: Any, in_label: bool = False) -> Item:
    response = f"Here it is:\n```python\n{text}\n```\nDone."
    if in_label:
        return Item("", "p", response, label=json.dumps(tests))
    return Item("", "p", response, metadata_json=json.dumps({"tests": tests}))


GOOD = [
    program("a, b = map(int, input().split())\nprint(a + b)", ECHO_SUM),
    program("a, b = map(int, input().split())\nprint(a + b)", ECHO_SUM, in_label=True),
    program("def twice(x):\n    return x * 2", TWICE),
    program("class Solution:\n    def twice(self, x):\n        print('noise')\n        return x + x", TWICE),
    program("def f(x):\n    return x + 1", ["assert f(1) == 2", "assert f(2) == 3"]),
    program("print('x' * 1000, end='  \\n\\n')", {"inputs": [""], "outputs": ["x" * 1000]}),
    program("if __name__ == '__main__':\n    print(3)", {"inputs": [""], "outputs": ["3"]}),
    program("import os, sys\nprint(len(os.environ) <= 4, os.listdir())", {"inputs": [""], "outputs": ["True ['program.py']"]}),
    Item("", "p", "print(input())", metadata_json=json.dumps({"tests": {"inputs": ["3"], "outputs": ["3"]}})),
    *(
        program(f"print(3)\n{end}\nprint(4)", {"inputs": [""], "outputs": ["3"]})
        for end in ("exit()", "quit()", "exit(0)", "raise SystemExit")
    ),
    program(
        "import sys\nprint(callable(help), str(copyright)[:9])\nsys.exit(0)", {"inputs": [""], "outputs": ["True Copyright"]}
    ),
    program("print(3)\n```\nOutput:\n```\n3\n```\n```bash\npython a.py", {"inputs": [""], "outputs": ["3"]}),
]
BAD = [
    program("print(3)\nexit(1)", {"inputs": [""], "outputs": ["3"]}),
    program("print(0)", ECHO_SUM),
    program("def twice(x):\n    return x", TWICE),
    program("def thrice(x):\n    return x", TWICE),
    program("def half(x):\n    return 10**400", {"fn_name": "half", "inputs": [[3]], "outputs": [1.5]}),
    program("def f(x):\n    return x", ["assert f(1) == 2"]),
    program("def f(x) return x", ["assert f(1) == 2"]),
    program("while True: pass", ECHO_SUM),
    program("import time\ntime.sleep(1000)", ECHO_SUM),
    program("import os\nos._exit(0)", ECHO_SUM),
    program("import os\nos._exit(0)", TWICE),
    program("import os\nos._exit(0)", ["assert False"]),
    program("import os\nos.kill(0, 9)", ECHO_SUM),
    program("x = []\nwhile True: x.append(bytearray(1 << 24))", ECHO_SUM),
    program("while True: print('x' * 1000)", ECHO_SUM),
    program("import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass\nprint(3)", ECHO_SUM),
    program("open('big', 'wb').write(bytes(1 << 30))\nprint(3)", {"inputs": [""], "outputs": ["3"]}),
    Item("", "p", "", metadata_json=json.dumps({"tests": ECHO_SUM})),
]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def leftovers() -> tuple[set[int], set[str]]:
    return {p.pid for p in descendants()}, {
        name for name in os.listdir(tempfile.gettempdir()) if name.startswith("polyreme-reward-")
    }


@pytest.mark.parametrize(("programs", "score", "limit"), [(GOOD, 1.0, 60.0), (BAD, 0.0, 1.0)])
async def test_programs_are_judged_and_leave_nothing(programs: list[Item], score: float, limit: float) -> None:
    before = leftovers()
    reward = {"name": "code", "options": {"timeout": limit, "memory_mib": 128}}
    async with scoring(reward, item_timeout=200.0, workers=2) as scorer:
        assert summary(await scorer.score(programs)) == [("OK", score)] * len(programs)
    children, folders = leftovers()
    assert (children - before[0], folders - before[1]) == (set(), set())


async def test_a_function_finds_what_an_editor_imports_and_sums_may_be_rounded() -> None:
    solution = "class Solution:\n    def f(self, a: List[float]) -> float:\n        return math.fsum(Counter(a).elements()) * pow(2, 1, 5)"
    tests = {"fn_name": "f", "inputs": [[[0.1, 0.2]]], "outputs": [0.6]}
    async with scoring({"name": "code"}) as scorer:
        good = program(solution, tests)
        bad = program(solution, {**tests, "outputs": [0.61]})
        assert summary(await scorer.score([good, bad])) == [("OK", 1.0), ("OK", 0.0)]


async def test_outputs_may_be_lists_of_one_value_as_in_apps() -> None:
    tests = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [4]]}
    texts = [f"def f(x):\n    return {value}" for value in ("2 * x", "[2 * x]", "x", "[x]")]
    async with scoring({"name": "code"}) as scorer:
        found = await scorer.score([program(text, tests) for text in texts])
        mixed = await scorer.score([program(texts[0], {**tests, "outputs": [[2], 4]})])
    assert summary([*found, *mixed]) == [("OK", score) for score in (1.0, 1.0, 0.0, 0.0, 0.0)]


async def test_the_share_of_passed_tests() -> None:
    async with scoring({"name": "code", "options": {"partial": True}}) as scorer:
        assert summary(await scorer.score([program("print(3)", ECHO_SUM)])) == [("OK", 0.5)]


@pytest.mark.parametrize(
    ("tests", "outcome"),
    [
        (json.dumps(ECHO_SUM), ("OK", 0.5)),
        (json.dumps(["assert False", "assert True"]), ("OK", 0.5)),
        ("assert False", ("OK", 0.0)),
        (json.dumps({"inputs": []}), ("ERROR", 0.0)),
    ],
)
async def test_a_column_of_tests_may_be_json(tests: str, outcome: tuple[str, float]) -> None:
    async with scoring({"name": "code", "options": {"partial": True}}) as scorer:
        assert summary(await scorer.score([program("print(3)", tests)])) == [outcome]


async def test_a_program_has_no_network() -> None:
    text = "import socket\ntry:\n    socket.create_server(('127.0.0.1', 0))\nexcept OSError:\n    print('none')"
    async with scoring({"name": "code"}) as scorer:
        (answer,) = await scorer.score([program(text, {"inputs": [""], "outputs": ["none"]})])
        assert answer.score == 1.0


@pytest.mark.parametrize("tests", [None, [], {}, 3, [3], {"inputs": ["1"], "outputs": []}, {"inputs": [1], "outputs": [1]}])
async def test_a_row_without_usable_tests_is_an_error(tests: Any) -> None:
    async with scoring({"name": "code"}) as scorer:
        metadata = {} if tests is None else {"tests": tests}
        (answer,) = await scorer.score([Item("", "p", "print(3)", metadata_json=json.dumps(metadata))])
        assert (answer.status.name, "tests" in answer.message) == ("ERROR", True)


async def test_a_killed_worker_takes_its_files_along(tmp_path: Path) -> None:
    before = leftovers()
    async with scoring({"name": "code", "options": {"timeout": 60}}, item_timeout=1.0) as scorer:
        (answer,) = await scorer.score([program("while True: pass", ECHO_SUM)])
        assert answer.status.name == "TIMEOUT"
        assert "while True: pass" in answer.message  # it names the item
    children, folders = leftovers()
    assert (children - before[0], folders - before[1]) == (set(), set())


MATH = [
    (r"so \boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
    (r"\boxed{(1,2)}", "(1, 2)", 1.0),
    (r"$\{1,2\}$", r"\{2,1\}", 1.0),
    (r"The answer is $x=3$", "3", 1.0),
    (r"\boxed{3}, and not 4", "$3$", 1.0),
    (r"\boxed{4}", "3", 0.0),
    ("no idea", "3", 0.0),
    (r"\boxed{3}", "3 dollars", 1.0),
    (r"\boxed{4}", "3 dollars", 0.0),
    (r"\boxed{10}", "10 km/h", 1.0),
    (r"\boxed{2}", "2 sin x", 0.0),
    (r"\boxed{36}", r"\$36", 1.0),
    (r"\boxed{\$32,\!348}", r"\$32,\!348", 1.0),
]


async def test_mathematics() -> None:
    pytest.importorskip("math_verify")
    async with scoring({"name": "math"}) as scorer:
        answers = await scorer.score([Item("", "p", response, label=label) for response, label, _ in MATH])
        assert summary(answers) == [("OK", score) for _, _, score in MATH]
        (answer,) = await scorer.score([Item("", "p", "3")])
        assert answer.status.name == "ERROR"
