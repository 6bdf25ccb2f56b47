"""The variables of the service's environment that workers and other processes can read."""

import subprocess
import sys
from pathlib import Path

from polyreme.isolation.privacy import scrubbed


def test_only_usual_and_named_variables_are_kept() -> None:
    usual = {"PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "PYTHONPATH": "/opt", "CUDA_VISIBLE_DEVICES": "0", "HF_HOME": "/hf"}
    secret = {
        "POLYREME_TOKEN": "x",
        "POLYREME_REDIS_PASSWORD": "x",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "API_KEY": "x",
    }
    assert scrubbed({**usual, **secret}, []) == usual
    assert scrubbed({**usual, **secret}, ["API_KEY", "NOT_THERE"]) == {**usual, "API_KEY": "x"}


def test_inspection_is_refused_by_a_process_and_its_forks() -> None:
    script = """
import ctypes, os
from polyreme.isolation.privacy import refuse_inspection
dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
before = dumpable()
refuse_inspection()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, str(dumpable()).encode())
    os._exit(0)
os.wait()
print(before, dumpable(), os.read(read, 9).decode())
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True).stdout
    assert said.split() == ["1", "0", "0"]


def test_the_service_refuses_inspection_before_it_serves(tmp_path: Path) -> None:
    """Its memory and environment contain the run's password and token."""
    config = tmp_path / "rewards.yaml"
    config.write_text("reward: {rewards: [{name: exact}]}\n")
    script = """
import asyncio, ctypes, sys
from pathlib import Path
from polyreme_reward import command, server
def serve(*_):
    print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)
    sys.exit()
server.serve = serve
asyncio.run(command._serve(None, None, Path(sys.argv[1]), lambda redis: None, 0.0))
"""
    said = subprocess.run([sys.executable, "-c", script, config], capture_output=True, text=True, timeout=300, check=True).stdout
    assert said.split() == ["0"]
