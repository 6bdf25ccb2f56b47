"""What workers get to know of the service's environment."""

import subprocess
import sys

from polyreme_reward.isolation.privacy import scrubbed


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
from polyreme_reward.isolation.privacy import refuse_inspection
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
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["1", "0", "0"]
