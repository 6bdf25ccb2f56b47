"""The built distributions, installed in an empty environment: the command works outside a checkout, and an uninstall leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("polyreme", "polyreme-environment", "polyreme-reward", "polyreme-rollout", "polyreme-trainer")


def installer() -> "tuple[Path, dict[str, str]]":
    """uv of this environment, with pip's settings."""
    script = f"import sys; sys.path.insert(0, {str(ROOT / 'requirements')!r}); import json, os, subprocess, uv\n" + (
        "listing = subprocess.run([sys.executable, '-m', 'pip', 'config', 'list'], check=True, capture_output=True, text=True)\n"
        "print(json.dumps(uv.environment(uv.parse(listing.stdout), os.environ)))"
    )
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return Path(sys.executable).with_name("uv"), json.loads(found.stdout)


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_the_built_files_train_outside_a_checkout_and_leave_nothing(tmp_path: Path) -> None:
    uv, settings = installer()
    settings["UV_FIND_LINKS"] = ",".join([str(tmp_path / "dist"), *settings.get("UV_FIND_LINKS", "").split(",")]).strip(",")
    venv = tmp_path / "venv"

    def run(*words: str | Path, **environment: str) -> str:
        given = {**settings, **environment}
        done = subprocess.run(
            [*map(str, words)], cwd=tmp_path, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    run(ROOT / "requirements" / "dist.sh", sys.executable, tmp_path / "dist")
    assert len([*(tmp_path / "dist").iterdir()]) == 2 * len(NAMES)
    run(uv, "venv", "-q", "--python", os.path.realpath(sys.executable), venv)
    locked = ROOT / "requirements" / "cpu.txt"
    run(uv, "pip", "install", "-q", "--python", venv / "bin" / "python", "polyreme[all]", "-c", locked)
    assert len([*(venv / "lib").rglob("polyreme*")]) > len(NAMES)

    home = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    version = run(venv / "bin" / "polyreme", "--version", **home).split()[1]
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    folder = tmp_path / "a demo"
    warm = f"trainer.sft=[{{data: '{folder / 'data' / 'sft_short.jsonl'}', steps: 20, batch_size: 16, lr: 2.0e-3}}]"
    small = ("iterations=2", "groups_per_iteration=4", "eval_samples=16", "rollout.max_new_tokens=24", warm)
    output = run(venv / "bin" / "polyreme", "demo", folder, *small, **home)
    summary = json.loads((folder / "runs" / "running-total" / "summary.json").read_text())
    assert (summary["state"], summary["iterations"]) == ("done", 2), output
    assert (Path(summary["hf_path"]) / "model.safetensors").exists()

    run(uv, "pip", "uninstall", "-q", "--python", venv / "bin" / "python", *NAMES)
    left = [*(venv / "lib").rglob("polyreme*"), *(venv / "bin").glob("polyreme*")]
    assert not left
