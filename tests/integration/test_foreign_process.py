"""Processes of another package: they end with their owner, and see no secret."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from polyreme_environment.foreign_process import run_foreign
from support.waiting import until, wait_until

SLEEPS = """
if __name__ == "__main__":
    import subprocess, time
    child = subprocess.Popen(["sleep", "1000"])
    print(f"started {os.getpid()} {child.pid} {sorted(os.environ)}", flush=True)
    time.sleep(1000)
"""
OWNER = """
import asyncio, sys
from pathlib import Path
from polyreme_environment.foreign_process import run_foreign

async def main():
    process = await run_foreign("foreign", Path(sys.argv[1]), sys.argv[2], [], ())
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def test_a_process_ends_when_its_owner_is_killed(venv: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, venv, SLEEPS], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        process = psutil.Process(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


async def test_a_process_that_is_closed_leaves_none_and_saw_no_secret(
    venv: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in ("RUN_TOKEN", "MY_KEY"):
        monkeypatch.setenv(name, "secret")
    process = await run_foreign("foreign", venv, SLEEPS, [], ["MY_KEY"], MORE="1")
    await until(lambda: any("started" in message for message in caplog.messages))
    (told,) = [message for message in caplog.messages if "started" in message]
    _, _, *pids, names = told.split(" ", 4)
    assert "'MY_KEY'" in names and "'MORE'" in names and "RUN_TOKEN" not in names
    await process.close()
    assert not psutil.pid_exists(int(pids[0]))
    await until(lambda: not psutil.pid_exists(int(pids[1])) or psutil.Process(int(pids[1])).status() == psutil.STATUS_ZOMBIE)
    assert (await process.wait()).startswith("exited with status -15: started")
