"""The bench for a machine's accelerator, on the processor."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench" / "accelerator.py"
BROUGHT = ("huggingface-hub", "numpy", "safetensors", "torch", "transformers")
"""What the machine has of its own, with what these need."""


def run(*parts: str, seconds: float, python: Path | str = sys.executable) -> tuple[int, dict[str, Any]]:
    argv = [python, BENCH, "--device", "cpu", "--seconds", f"{seconds}", *(["--only", *parts] if parts else [])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.returncode, found


def machine(folder: Path) -> Path:
    """A bare environment with torch and transformers, and the wheels of `make accelerator-wheels`, installed without an index. Its Python."""
    version = ".".join(map(str, sys.version_info[:2]))
    script = ROOT / "requirements" / "accelerator_wheels.sh"
    subprocess.run([script, sys.executable, folder / "wheels", version, os.uname().machine], check=True, timeout=900)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=300)
    python = folder / "venv" / "bin" / "python"
    wheels = sorted((folder / "wheels").glob("*.whl"))
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", *wheels], check=True, timeout=600)
    site = folder / "venv" / "lib" / f"python{version}" / "site-packages"
    for name in closure(BROUGHT):
        of_machine = distribution(name)
        for top in {file.parts[0] for file in of_machine.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(of_machine.locate_file(top))))
    return python


def closure(names: Sequence[str]) -> list[str]:
    sys.path.insert(0, str(ROOT / "requirements"))
    try:
        import images  # type: ignore[import-not-found]  # of a folder that is no package
    finally:
        sys.path.pop(0)
    return [line.partition("==")[0] for line in images.needed(list(names))]


@pytest.mark.real
def test_a_part_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "nonsense")
    code, found = run("lora", "doctor", seconds=220)
    assert (code, found["failed"]) == (1, ["lora", "doctor"])
    assert "Invalid log settings: nonsense" in found["measured"]["lora"]["error"]
    monkeypatch.delenv("TORCH_LOGS")
    code, found = run("lora", seconds=220)
    assert (code, found["met"]) == (0, True) and found["measured"]["lora"]["frozen_tensors"] > 0


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1800)
def test_every_part_works() -> None:
    code, found = run(seconds=1500)
    assert (code, found["failed"]) == (0, []), found


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(2400)
def test_a_bare_machine_needs_only_the_wheels(tmp_path: Path) -> None:
    code, found = run("doctor", "sleep", "loop", seconds=900, python=machine(tmp_path))
    assert (code, found["failed"]) == (0, []), found
