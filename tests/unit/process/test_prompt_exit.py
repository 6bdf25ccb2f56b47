"""The end of a process whose work is done: its status, and what still happens."""

import os
import subprocess
import sys

import pytest

_START = "import atexit, sys, threading\nfrom polyreme.process.prompt_exit import prompt_exit\n"


def _run(program: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", _START + program]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    ("last", "status", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit('words')", 1, "words\n"),
        ("raise ValueError('words')", 1, "ValueError: words\n"),
    ],
)
def test_the_status_is_that_of_the_block(last: str, status: int, error: str) -> None:
    done = _run(f"with prompt_exit():\n    {last}\n")
    assert done.returncode == status
    assert done.stderr.endswith(error) and bool(done.stderr) == bool(error)


def test_exit_handlers_run_and_outputs_are_complete() -> None:
    done = _run("atexit.register(print, 'handler')\nwith prompt_exit():\n    print('x' * 10_000)\n")
    assert done.stdout == "x" * 10_000 + "\nhandler\n"


def test_nothing_is_taken_apart() -> None:
    kept = "class Kept:\n    def __del__(self): print('finalizer')\nkept = Kept()\n"
    assert _run(kept).stdout == "finalizer\n"
    assert _run(kept + "with prompt_exit():\n    pass\n").stdout == ""


def test_a_thread_that_is_no_daemon_is_waited_for() -> None:
    thread = "threading.Thread(target=lambda: print(sys.stdin.read())).start()\n"
    assert _run(f"with prompt_exit():\n    {thread}    sys.exit(3)\n", given="words").stdout == "words\n"


def test_a_broken_output_ends_as_without_it() -> None:
    program = (
        "import os\nreader, writer = os.pipe()\nos.close(reader)\nos.dup2(writer, 1)\nwith prompt_exit():\n    print('words')\n"
    )
    done = _run(program)
    assert done.returncode == 120 and "BrokenPipeError" in done.stderr
