"""An interpreter in a sandbox: what a call shows, what outlives it, and what hostile code cannot do."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polyreme.isolation.sandbox.interpreter import Interpreter
from polyreme.isolation.sandbox.program import Limits, Mode, SandboxError
from support.processes import command_line, descendants

LONG, SHORT = 60.0, 0.3
GONE = "its variables and files are gone, and the next call starts a new one)"


@pytest.fixture
def python(mode: Mode) -> Iterator[Interpreter]:
    interpreter = Interpreter(mode, Limits(LONG, 128, disk_mib=8, output_bytes=1000))
    assert interpreter.run("kept = 'kept'", LONG).text == ""
    yield interpreter
    interpreter.close()
    assert not sandboxed()


def sandboxed() -> list[psutil.Process]:
    return [process for process in descendants() if "-X" in command_line(process)]


def test_a_call_shows_what_a_prompt_does(python: Interpreter) -> None:
    def said(code: str) -> str:
        return python.run(code, LONG).text

    assert said("import sys\nx = 3\nprint('a')\nprint('b', file=sys.stderr)\nx + 1") == "a\nb\n4"
    assert (said("x"), said("None"), said(""), said("_"), said("[__name__, 'é']")) == ("3", "", "", "3", "['__main__', 'é']")
    assert said("def half(n):\n    return x / n\n\nhalf(0)").splitlines()[-7:] == [
        "Traceback (most recent call last):",
        '  File "<call 8>", line 4, in <module>',
        "    half(0)",
        '  File "<call 8>", line 2, in half',
        "    return x / n",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    failed = python.run("print('before')\nx +", LONG)
    assert failed.text.splitlines() == ['  File "<call 9>", line 2', "    x +", "       ^", "SyntaxError: invalid syntax"]
    assert failed.error == "SyntaxError: invalid syntax" and not python.run("x", LONG).error
    assert said("open('notes', 'w').write('12')") == "2" and said("open('notes').read()") == "'12'"


ENDLESS = [
    "while True: pass",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "print('said')\ntry:\n    while True: pass\nexcept BaseException: pass",
    "import signal\nfor each in range(1, 32):\n    if each not in (9, 19): signal.signal(each, signal.SIG_IGN)\nwhile True: pass",
    "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin).start()\nexit()",
]


def test_a_call_beyond_its_time_ends_the_interpreter(python: Interpreter) -> None:
    for code in ENDLESS:
        assert not python.run("kept = 'kept'", LONG).error
        said = python.run(code, SHORT)
        assert said.text.endswith(GONE) and "since the call took longer than" in said.error
        assert ("said" in said.text) == ("said" in code) and not sandboxed()
        assert python.run("kept", LONG).error == "NameError: name 'kept' is not defined"


ENDS = [  # (code, exit status); Landlock's programs are not the first process of a namespace, whose SIGABRT is another signal
    ("print('bye')\nimport os\nos._exit(3)", (3,)),
    ("exit()", (0,)),
    ("import os\nos.abort()", (134, 139)),
    ("import os\nos.closerange(0, 64)", (0, 1, 120)),
    ("import ctypes\nctypes.string_at(0)", (139,)),
    ("import os, sys\n_ = os.write(sys._getframe(2).f_locals['fd'], b'x' * 10_000)", (137,)),
]


def test_code_that_ends_the_interpreter_is_told_so(python: Interpreter) -> None:
    for code, statuses in ENDS:
        assert not python.run("kept = 'kept'", LONG).error
        said = python.run(code, LONG)
        assert said.error in [f"the interpreter has ended with exit status {status}" for status in statuses], code
        assert said.text.endswith(GONE) and said.text.startswith("bye" if "bye" in code else "(")
        assert not sandboxed() and "NameError" in python.run("kept", LONG).error


TROUBLE = [
    ("x = bytearray(1 << 30)", "MemoryError"),
    ("for _ in range(200): print('x' * 100_000)", "bytes are left out"),
    ("def deep(): return deep()\ndeep()", "RecursionError"),
    ("import sys\nsys.stdout.close()\nsys.stderr.close()", ""),
    ("import os\nos.close(1)\nos.close(2)", ""),
    ("import sys\nsys.stdout = sys.stderr = None\n1 / 0", "ZeroDivisionError"),
    ("class Bad(BaseException):\n    def __str__(self): raise SystemExit\nraise Bad", "Bad"),
    ("input()", "EOFError"),
    ("print('\\ud800')", "\\ud800"),
]


def test_harmless_trouble_keeps_the_state(python: Interpreter) -> None:
    for code, shows in TROUBLE:
        said = python.run(code, LONG)
        assert shows in said.text and len(said.text) < 1200
        assert python.run("print(kept)", LONG).text == "kept"


def test_no_code_runs_between_two_calls(python: Interpreter) -> None:
    python.run("import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()", LONG)
    process = sandboxed()[-1]
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    before = process.cpu_times()
    assert python.run("kept", LONG).text == "'kept'"
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert process.cpu_times() >= before and process.cpu_times() == process.cpu_times()


ESCAPES = [
    "import os\nwhile True: os.fork()",
    "import subprocess\nsubprocess.run(['/bin/true'])",
    "import socket\nsocket.create_connection(('127.0.0.1', 6379), 5)",
    "open('/etc/passwd').read()",
    "open(f'/proc/{parent}/environ', 'rb').read()",
    "open(f'/proc/{parent}/mem', 'rb').read(1)",
    "import os, signal\nos.kill(parent, signal.SIGKILL)",
    "import os, signal\nos.kill(os.getppid() or parent, signal.SIGKILL)",
    "open(source).read()",
    "open('/tmp/outside', 'x').write('x'); open(folder + '/outside', 'x')",
]


def test_code_reaches_nothing_outside(python: Interpreter, mode: Mode, tmp_path: Path) -> None:
    if mode is Mode.NONE:
        pytest.skip("it is not isolated")
    facts = {"parent": os.getpid(), "source": __file__, "folder": str(tmp_path)}
    python.run("\n".join(f"{name} = {value!r}" for name, value in facts.items()), LONG)
    for code in ESCAPES:
        said = python.run(code, LONG)
        assert said.error.split(":")[0] in ("PermissionError", "FileNotFoundError", "ProcessLookupError"), said
        assert python.run("kept", LONG).text == "'kept'" and not list(tmp_path.iterdir())


def test_files_beyond_their_limit_end_the_interpreter(python: Interpreter, mode: Mode) -> None:
    if mode is Mode.NONE:
        pytest.skip("it is not limited")
    code = "import time\nfor number in range(100):\n    open(str(number), 'wb').write(bytes(1 << 20))\ntime.sleep(60)"
    said = python.run(code, LONG)
    assert "No space left" in said.error or "the limit of disk" in said.error


def test_an_interpreter_ends_with_the_process_that_started_it(mode: Mode) -> None:
    """SIGKILL leaves no process that could clean up, and the interpreter is stopped between two calls."""
    owner = (
        "import sys, time\nfrom polyreme.isolation.sandbox.interpreter import Interpreter\n"
        "from polyreme.isolation.sandbox.program import Limits, Mode\n"
        "Interpreter(Mode(sys.argv[1]), Limits(60.0, 128)).run('1', 60.0)\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    process = psutil.Popen([sys.executable, "-c", owner, mode], stdout=-1, start_new_session=True)
    try:
        assert process.stdout.readline() == b"ready\n"
        below = process.children(recursive=True)
        assert below
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    _, alive = psutil.wait_procs(below, timeout=300)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_an_interpreter_that_does_not_start_says_why(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyreme.isolation.sandbox.program._BOOT", "import sys; sys.exit('out of order')")
    with pytest.raises(SandboxError, match="out of order"):
        Interpreter(mode, Limits(LONG, 128)).run("1", LONG)
    assert not sandboxed()
