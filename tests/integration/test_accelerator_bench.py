"""The bench for a machine's accelerator, on the processor."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "accelerator.py"


def run(*parts: str, seconds: float) -> tuple[int, dict[str, Any]]:
    argv = [sys.executable, BENCH, "--device", "cpu", *(["--only", *parts] if parts else [])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, found


@pytest.mark.real
def test_a_part_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "nonsense")
    code, found = run("lora", "doctor", seconds=280)
    assert (code, found["failed"]) == (1, ["lora", "doctor"])
    assert "Invalid log settings: nonsense" in found["measured"]["lora"]["error"]
    monkeypatch.delenv("TORCH_LOGS")
    code, found = run("lora", seconds=280)
    assert (code, found["met"]) == (0, True) and found["measured"]["lora"]["frozen_tensors"] > 0


@pytest.mark.slow
@pytest.mark.real
def test_every_part_works() -> None:
    code, found = run(seconds=800)
    assert (code, found["failed"]) == (0, [])
