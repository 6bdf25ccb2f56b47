"""The permissions of programs in a sandbox, forged results, and the choice of the mode."""

import json
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from polyreme.errors import ConfigError
from polyreme.isolation.sandbox import modes
from polyreme.isolation.sandbox import program as starting
from polyreme.isolation.sandbox.modes import choose, why_not
from polyreme.isolation.sandbox.program import Limits, Mode, SandboxError
from polyreme.isolation.sandbox.run import Ended, check, run
from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import make_rule
from support.processes import command_line, descendants
from support.rewards import serving

LIMITS = Limits(seconds=20.0, memory_mib=128)
SHORT = Limits(seconds=0.5, memory_mib=128)


def script(mode: Mode, program: str, stdin: str = "", limits: Limits = LIMITS, **looks: float) -> Ended:
    return run(mode, {"kind": "script", "program": program}, stdin, limits, **looks)


def test_a_program_has_its_input_a_directory_threads_and_packages(mode: Mode) -> None:
    program = """
import asyncio, os, tempfile
import numpy, threading
assert numpy.ones(1000).dot(numpy.ones(1000)) == 1000 and len(os.environ) <= 4
with tempfile.TemporaryFile() as file:
    file.write(b"x")
open("own", "w").write("x")
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
os.remove("own")
print(input(), os.listdir(), __name__)
"""
    ended = script(mode, program, "é\ud800\n".encode("utf-8", "replace").decode())
    assert (ended.well, ended.stdout.decode()) == (True, "thread\né? ['program.py'] __main__\n")


def test_files_without_a_name_within_the_limit_are_allowed(mode: Mode) -> None:
    program = """
import mmap, sys, tempfile, time
with tempfile.TemporaryFile() as file, mmap.mmap(0, 0, access=mmap.ACCESS_READ) as given:
    file.write(bytes(20 << 20)); file.flush()
    with mmap.mmap(file.fileno(), 0): time.sleep(0.2)
    print(len(given))
"""
    ended = script(mode, program, "x" * (40 << 20))
    assert (ended.over, ended.stdout) == (None, b"41943040\n")


@pytest.mark.parametrize(
    ("program", "over"),
    [
        ("while True: pass", "time"),
        ("import time\ntime.sleep(1000)", "time"),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
        ("import os\nos._exit(3)", None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\nos.abort()", None),
        ("x = bytearray(1 << 30)", None),
        ("import ctypes\nctypes.string_at(0)", None),
        ("def", None),
    ],
)
def test_a_failing_program_is_not_a_sandbox_error(mode: Mode, program: str, over: str | None) -> None:
    ended = script(mode, program, limits=SHORT if over == "time" else LIMITS)
    assert (ended.well, ended.over) == (False, over)
    assert not [process for process in descendants() if "-X" in command_line(process)]


def test_a_sandbox_that_takes_its_time_breaks_no_limit(mode: Mode) -> None:
    """Usage before the program's start does not count towards its limits."""
    assert all(script(mode, "pass", look_seconds=1e-6).well for _ in range(10))


VALUES = "def f(x):\n    return x + 1\n"
LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return hash(2)
    def __abs__(self): return 0
    def __sub__(self, other): return self
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    @property
    def __class__(self): return int
f = Liar()
"""
SLY = LIAR.replace("    @property\n    def __class__(self): return int\n", "")
NUMBER = "class Sly:\n    def __sub__(self, other): return 0.0\n    __rsub__ = __sub__\nf = lambda x: Sly()\n"
EMPTY = "class Sly:\n    def __sub__(self, other): return set()\n    __xor__ = __sub__\nf = lambda x: Sly()\n"
NUMPY = "import numpy\ndef f(x): return numpy.int64(x) if x < 5 else numpy.float32(x) if x < 9 else numpy.bool_(True)\n"
VECTOR = "class V:\n    def __init__(self, x): self.x = x\n    def __mul__(self, k): return V(self.x * k)\n    def __str__(self): return f'<{self.x}>'\n"
SPACE = "class V:\n    def __init__(self, x): self.x = x\n    def __rmul__(self, k): return V([k * a for a in self.x])\n    def __matmul__(self, o): return sum(a * b for a, b in zip(self.x, o.x))\n    def __len__(self): return len(self.x)\n    def __iter__(self): return iter(self.x)\n"
DATES = "from datetime import datetime, timedelta\ndef f(d): return d + timedelta(days=1)\ndef g(): return [datetime(2020, 1, 2, 3), range(3)]\n"
ARRAYS = "import numpy as np\ndef f(x): return np.array(x) * 2\ndef g(x): x += 1\n"
DATE = "class date:\n    def __init__(self, *_): pass\n    def __eq__(self, other): return True\n    def __reduce__(self): return date, (2020, 1, 9)\ndate.__module__ = 'datetime'\nf = lambda x: date()\n"
ARRAY = "class Sly:\n    def __eq__(self, other): return self\n    __sub__ = __rsub__ = __eq__\n    def __iter__(self): return iter([])\n    def __len__(self): return 0\n    def all(self): return True\nf = lambda x: Sly()\n"
TESTS = [
    # (program, test, verdict)
    (VALUES, "assert f(1) == 2", "pass"),
    (VALUES, "assert f(1) == 3", "fail"),
    (VALUES, "assert f(x=1) == 2 and f(1.5) == 2.5 and f(10**5000) == 10**5000 + 1", "pass"),
    (VALUES, "assert g(1) == 2", "fail"),
    (VALUES, "for k in range(3):\n    assert f(k) == k + 1, k", "pass"),
    (VALUES, "def check(candidate):\n    assert [candidate(k) for k in range(3)] == [1, 2, 3]\ncheck(f)", "pass"),
    (VALUES, "assert f('a') == 2", "fail"),
    (VALUES, "try:\n    f('a')\nexcept TypeError:\n    pass\nelse:\n    assert False", "pass"),
    (VALUES, "assert f(lambda: 1) == 2", "error"),
    (VALUES, "assert f(1) ==", "error"),
    (VALUES, "import sys; sys.exit(0)", "fail"),
    (VALUES, "while True: pass", "fail"),
    ("import math\nfrom math import isclose\ndef f(x): return x / 3", "assert math.isclose(f(1), 1 / 3) and isclose(f(1), 1 / 3)", "pass"),
    ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == Counter('aab') == {'a': 2, 'b': 1}", "pass"),
    ("def f(): return (1, [2.5, None], {'a': {3}}, b'x', 1j, float('nan'))", "a = f()\nassert a[:5] == (1, [2.5, None], {'a': {3}}, b'x', 1j) and a[5] != a[5]", "pass"),
    ("def f(x): x.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]", "pass"),
    ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(3)) == 3", "pass"),
    ("class Stack:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n    def __len__(self): return len(self.all)", "s = Stack()\ns.push(3)\nassert len(s) == 1 and s.all == [3] and isinstance(s, Stack) and not isinstance(s, int)", "pass"),
    ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)", "assert (V(1) + V(2)).x == 3", "pass"),
    ("def f():\n    raise KeyError('no')", "try:\n    f()\nexcept KeyError as e:\n    assert 'no' in str(e)", "pass"),
    ("X = 3", "assert X == 3", "pass"),
    (NUMPY, "assert f(3) == 3 and f(3) in (2, 3) and f(8) == 8.0 and f(9) is True and abs(f(8) - 8) < 1e-6", "pass"),
    (NUMPY, "assert f(3) == 4", "fail"),
    ("from fractions import Fraction\ndef f(x): return Fraction(x, 3)", "import fractions\nassert f(1) == fractions.Fraction(1, 3) and abs(f(1) - 1 / 3) < 1e-9", "pass"),
    ("from decimal import Decimal\ndef f(x): return Decimal(x) / 4", "from decimal import Decimal\nassert f(1) == Decimal('0.25') and 2 * f(1) == 0.5", "pass"),
    (VECTOR, "assert (V(2) * 3).x == 6 and str(V(2) * 3) == '<6>'", "pass"),
    (SPACE, "assert V([1, 2]) @ V([3, 4]) == 11 and list(3 * V([1, 2])) == [3, 6]", "pass"),
    (DATES, "import datetime\nassert f(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 2)", "pass"),
    (DATES, "import datetime\nassert f(datetime.date(2020, 1, 1)) == datetime.date(2020, 1, 3)", "fail"),
    (DATES, "import datetime\nassert g() == [datetime.datetime(2020, 1, 2, 3), range(3)]", "pass"),
    ("import datetime\ndef f(): return datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)", "assert f().day == 2", "pass"),
    ("from collections import deque\ndef f(d): d.append(3)", "from collections import deque\nd = deque([1])\nf(d)\nassert d == deque([1, 3])", "pass"),
    (ARRAYS, "assert np.array_equal(f([1, 2]), [2, 4]) and (f(np.array([1.5])) == [3]).all() and f([[1]]).shape == (1, 1)", "pass"),
    (ARRAYS, "a = np.array([1, 2])\ng(a)\nassert a.tolist() == [2, 3] and abs(f(a) - [4, 6]).max() < 1e-6", "pass"),
    (ARRAYS, "assert np.allclose(f([1, 2]), [2, 5])", "fail"),
    # Forged.
    (DATE, "import datetime\nassert f(1) == datetime.date(2020, 1, 2)", "fail"),
    (ARRAY, "assert np.array_equal(f([1, 2]), [2, 4])", "fail"),
    (ARRAY, "assert np.allclose(f([1, 2]), [2, 4])", "fail"),
    (ARRAY, "assert (f([1, 2]) == [2, 4]).all()", "fail"),
    (ARRAY, "assert len(f(1) - {1, 2}) == 0", "fail"),
    (LIAR, "assert f(1) == 2", "fail"),
    (LIAR, "assert 2 == f(1)", "fail"),
    (LIAR, "assert f(1) in (1, 2)", "fail"),
    (LIAR, "assert f(1) in {2}", "fail"),
    (LIAR, "assert not f(1) != 2", "fail"),
    (LIAR, "assert abs(f(1) - 2) < 1e-6", "fail"),
    (LIAR, "assert [f(1)] == [2]", "fail"),
    (SLY, "assert abs(f(1) - 2) < 1e-6", "fail"),
    (SLY, "assert abs(-(f(1) - 2)) < 1e-6", "fail"),
    (SLY, "assert float(abs(f(1) - 2) / 2) < 1e-6", "fail"),
    (SLY, "assert (f(1) - 2) or True", "fail"),
    (NUMBER, "assert abs(f(1) - 2) < 1e-6", "fail"),
    (NUMBER, "assert abs(2 - f(1)) < 1e-6", "fail"),
    (EMPTY, "assert f(1) - {1, 2} == set()", "fail"),
    (EMPTY, "assert not f(1) ^ {1, 2}", "fail"),
    ("def f(x): raise StopIteration", "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (2, 3)]))", "fail"),
    ("def f(x): yield x", "found = iter(f(1))\nassert next(found) == 1 and next(found, None) is None", "pass"),
    (LIAR, "assert isinstance(f(1), int) and f(1) >= 2", "fail"),
    (LIAR, "import math\nassert math.isclose(f(1), 2)", "fail"),
    (VALUES + "import builtins\nabs = lambda x: 0\nall = any = lambda x: True\nbuiltins.abs = abs", "assert abs(f(1) - 9) < 1e-6 and all(f(k) == 9 for k in range(2))", "fail"),
    (VALUES + "class math:\n    isclose = lambda a, b: True", "assert math.isclose(f(1), 9)", "fail"),
    (VALUES + "import unittest.mock\nf = unittest.mock.ANY", "assert f == 9", "fail"),
    (VALUES + "from unittest.mock import ANY as f", "assert f == 9", "fail"),
    ("import os\nos._exit(0)", "assert False", "fail"),
    ("import os\nos._exit(0)", "assert True", "fail"),
    ("import sys\nsys.exit(0)", "assert False", "fail"),
    ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'pass')\n    except OSError: pass\nos._exit(0)", "assert False", "fail"),
    ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\npass')\n    except OSError: pass\n" + VALUES, "assert f(1) == 9", "fail"),
    ("import sys\nclass Exit(AssertionError): pass\ndef f(x): sys.modules['__main__'].__dict__.clear(); raise Exit", "assert f(1) == 2", "fail"),
    ("import sys\nsys.modules['polyreme.isolation.sandbox.inside.values'].encode = lambda *_: {'reference': 0}\n" + VALUES, "assert f(1) == 2", "fail"),
    ("import sys\nsys.modules['polyreme.isolation.sandbox.inside.values'].encode = lambda *_: {'reference': 'x'}\n" + VALUES, "assert f(1) == 2", "fail"),
    ("import sys\nsys.modules['polyreme.isolation.sandbox.inside.values'].encode = lambda *_: [[[]]]\n" + VALUES, "assert f(1) == 2", "fail"),
    ("import sys\nsys.modules['polyreme.isolation.sandbox.inside.values'].send = lambda fd, _: __import__('os').write(fd, b'\\xff' * 100)\n" + VALUES, "assert f(1) == 2", "fail"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "test", "verdict"), TESTS)
def test_an_assertion_is_decided_outside_the_program(program: str, test: str, verdict: str) -> None:
    found = check(choose(unsafe=True), program, test, SHORT if "while True" in test else LIMITS)
    assert found.partition(":")[0] == verdict, found


FORGED_VALUES = [
    "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'null')\n    except OSError: pass\nos._exit(0)",
    "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\nnull')\n    except OSError: pass\nos._exit(0)",
    LIAR,
    "import json\njson.dumps = lambda value: '2 '\ndef f(x): return 3\nimport os\nos._exit(0)",
    "class I(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '2'\ndef f(x): return I(3)",
    "class L(list):\n    def __eq__(self, other): return True\ndef f(x): return L([9])",
]


@pytest.mark.parametrize("program", FORGED_VALUES)
def test_a_returned_value_is_compared_outside_the_program(program: str) -> None:
    assert score(program, {"fn_name": "f", "inputs": [[1]], "outputs": [2]}) == 0.0


def test_a_number_of_numpy_is_a_returned_value() -> None:
    assert score(NUMPY, {"fn_name": "f", "inputs": [[1], [9]], "outputs": [1, True]}) == 1.0


def score(program: str, tests: Any, **options: Any) -> object:
    return make_rule("code", options)(Item("", "p", program, metadata_json=json.dumps({"tests": tests})))


def test_a_test_that_cannot_be_judged_safely_is_an_error() -> None:
    with pytest.raises(RewardError, match="plain values"):
        score(VALUES, ["assert f(lambda: 1) == 2"])


@pytest.mark.parametrize(
    "tests", [{"inputs": ["3"], "outputs": ["3"]}, ["assert f(1) == 2"], {"fn_name": "f", "inputs": [[1]], "outputs": [2]}]
)
def test_a_sandbox_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tests: Any) -> None:
    reward = make_rule("code", {})
    monkeypatch.setattr(starting, "_PYTHON", "/nowhere/python")
    with pytest.raises(RewardError, match="sandbox"):
        reward(Item("", "p", "print(input())", metadata_json=json.dumps({"tests": tests})))


def test_a_sandbox_that_breaks_while_it_starts_is_an_error(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_BOOT", "import sys; sys.exit('out of order')")
    with pytest.raises(SandboxError, match="out of order"):
        script(mode, "print(3)")


def test_where_nothing_isolates_the_reward_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "why_not", lambda mode: "refused")
    with pytest.raises(ConfigError) as raised:
        make_rule("code", {})
    assert "bubblewrap: refused; landlock: refused" in raised.value.found
    assert "unsafe: true" in raised.value.do
    reward = make_rule("code", {"unsafe": True})
    assert "not isolated" in reward.note  # type: ignore[attr-defined]
    assert reward(Item("", "p", "print(3)", metadata_json=json.dumps({"tests": {"inputs": [""], "outputs": ["3"]}}))) == 1.0


# Refuses system calls like a container's default profile, then prints the chosen mode.
REFUSED = """
import ctypes, sys
from polyreme.errors import ConfigError
from polyreme.isolation.sandbox import landlock, modes, seccomp
import platform
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
never = {name: seccomp._NAMESPACES[name] for name in ("unshare", "setns", "mount")}
if "landlock" in sys.argv:
    never["landlock_create_ruleset"] = (444, 444)
rules = [seccomp._Rule("clone", 0, 0x10000000, (0x10000000,))]
landlock.install(seccomp.assemble(never, rules, platform.machine()))
try:
    print(modes.choose(unsafe="unsafe" in sys.argv))
except ConfigError as error:
    print("refused", error.found)
"""


@pytest.mark.parametrize(
    ("refused", "chosen"), [((), "landlock"), (("landlock",), "refused bubblewrap: "), (("landlock", "unsafe"), "none")]
)
def test_the_mode_is_the_best_that_the_machine_allows(refused: tuple[str, ...], chosen: str) -> None:
    if why_not(Mode.LANDLOCK) is not None:
        pytest.skip("the kernel has no Landlock")
    argv = [sys.executable, "-c", REFUSED, *refused]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout
    assert said.startswith(chosen), said


def test_a_program_ends_with_the_process_that_started_it(mode: Mode) -> None:
    """SIGKILL leaves no process that could clean up."""
    starter = (
        "import sys\nfrom polyreme.isolation.sandbox.program import Limits, Mode\nfrom polyreme.isolation.sandbox.run import run\n"
        "run(Mode(sys.argv[1]), {'kind': 'script', 'program': 'import time; time.sleep(1000)'}, '', Limits(1000.0, 128))"
    )
    process = psutil.Popen([sys.executable, "-c", starter, mode], start_new_session=True)
    try:
        while not (below := process.children(recursive=True)) or not any("-X" in command_line(child) for child in below[-1:]):
            assert process.poll() is None
            time.sleep(0.02)
        below = process.children(recursive=True)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=300)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


async def test_the_mode_is_logged_and_described(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with serving({"name": "code"}) as (_, client, _):
            (told,) = (await client.get("/v1/rewards")).json()["rewards"]
    mode = choose(unsafe=False)
    assert told["description"].endswith(f"(programs are isolated by {mode})")
    assert f"programs are isolated by {mode}" in caplog.text


def test_a_program_inside_of_a_thought_is_not_run() -> None:
    right, wrong = (f"```python\nprint({value})\n```" for value in (5, 6))
    rule = make_rule("code", {})
    for response, verdict in (
        (f"<think>{wrong}</think>\n{right}", 1.0),
        (f"<think>{right}</think>\n{wrong}", 0.0),
        (f"<think>{right}</think>\nnothing", 0.0),
        (f"<think>{right}", 0.0),
        (f"<think>a fence ```python\n</think>\n{right}", 1.0),
    ):
        assert rule(Item("", "p", response, label='{"inputs": [""], "outputs": ["5"]}')) == verdict
