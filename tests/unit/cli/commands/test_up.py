"""What `polyreme up` warns about before it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from polyreme.cli.commands.up import open_ports
from polyreme.config.security import SecurityConfig
from support.configs import run_config
from support.waiting import wait_until


@pytest.mark.parametrize(
    ("security", "others", "warned"),
    [
        (None, [1001], True),
        (None, [], False),
        (SecurityConfig(token_env="TOKEN"), [1001, 1002], False),
        (SecurityConfig(certificate=Path("a"), key=Path("b")), [1001], True),
        (SecurityConfig(certificate=Path("a"), key=Path("b"), ca=Path("c"), mutual=True), [1001], False),
    ],
)
def test_ports_without_a_token_on_a_shared_machine(
    tmp_path: Path, security: SecurityConfig | None, others: list[int], warned: bool
) -> None:
    config = run_config(tmp_path).model_copy(update={"security": security})
    assert ("security.token_env" in open_ports(config, others)) == warned


_DETACHED = """
import os, signal, sys, time
from pathlib import Path
from polyreme.cli.commands.up import into_background
signal.signal(signal.SIGTERM, signal.default_int_handler)
command = os.getpid()
try:
    print("begun", flush=True)
    into_background(Path(sys.argv[1]))
    time.sleep(300)
finally:
    print("removed by", "its child" if os.getpid() != command else "the command", flush=True)
"""


def test_an_interrupted_detach_ends_the_start_and_removes_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _DETACHED, str(tmp_path / "up.log")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    wait_until(lambda: (tmp_path / "up.log").exists())
    process.terminate()
    assert process.communicate(timeout=60)[0] == "" and process.returncode == 130
    wait_until(lambda: "removed by its child" in (tmp_path / "up.log").read_text())
