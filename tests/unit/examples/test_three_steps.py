"""The script of examples/three_steps ends when it is interrupted, between two steps and within one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "three_steps"

BETWEEN = """
import os, signal, sys
import run

interruption = run.Interruption()
assert interruption.run([sys.executable, "-c", "pass"]) == 0
os.kill(os.getpid(), int(sys.argv[1]))
interruption.run([sys.executable, "-c", "open('begun', 'w')"])
assert interruption.asked
"""
WITHIN = """
import os, signal, sys
import run

child = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
status = run.Interruption().run([sys.executable, "-c", child])
assert status == -signal.SIGTERM, status
"""


def script(code: str, folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=environment, check=True, timeout=120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_after_a_signal_no_step_begins(tmp_path: Path, number: int) -> None:
    script(BETWEEN, tmp_path, str(int(number)))
    assert list(tmp_path.iterdir()) == []


def test_a_signal_reaches_the_running_step(tmp_path: Path) -> None:
    script(WITHIN, tmp_path)
