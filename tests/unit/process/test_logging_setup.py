"""The log of a process."""

import os
import subprocess
import sys

import pytest

WRITE = """
import logging
from polyreme.process import logging_setup
logging_setup.setup("service")
for name in ("polyreme.x", "polyreme_rollout.x", "polyreme_reward.x", "polyreme_environment.x", "polyreme_trainer.x"):
    logging.getLogger(name).info("from %s", name)
"""


@pytest.mark.parametrize("level", ["", "trace", "debug", "info"])
def test_every_service_logs_what_it_does(level: str) -> None:
    environment = {**os.environ, "POLYREME_LOG": level}
    done = subprocess.run([sys.executable, "-c", WRITE], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr.count("INFO    service: from polyreme") == 5, done.stderr
    assert ("POLYREME_LOG" in done.stderr) is (level == "trace")


def test_a_crash_inside_a_library_says_where_each_thread_was() -> None:
    crash = "import os\nfrom polyreme.process import logging_setup\nlogging_setup.setup('service')\nos.kill(os.getpid(), 11)"
    environment = {**os.environ, "PYTHONFAULTHANDLER": ""}  # the interpreter's own switch is off
    done = subprocess.run([sys.executable, "-c", crash], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -11 and "Segmentation fault" in done.stderr and "<module>" in done.stderr, done.stderr
