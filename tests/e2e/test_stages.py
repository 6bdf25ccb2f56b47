"""Executes docs/stages.md, resumes a stopped stage, and checks that examples/three_steps reaches its documented results."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from metric_rows import STAGE_METRICS

from support import guide
from support.stages import write_model
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PAGE = "stages.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    guide.write_files(PAGE, tmp_path)
    write_model(tmp_path)
    return tmp_path


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_the_guides_configuration_passes_its_checks(folder: Path) -> None:
    (check,) = guide.commands(PAGE, info="check")
    assert "checks         passed" in guide.run(check, folder, forks=True)


@pytest.mark.real
def test_every_stage_of_the_guide_trains_and_leaves_a_model(folder: Path) -> None:
    for command in guide.commands(PAGE):
        guide.run(command, folder)
    for name, metric in (("supervised", "loss"), ("preferences", "accuracy"), ("preferred", "rewards/margins"), ("kto", "kl")):
        run_dir = folder / "runs" / name
        assert json.loads((run_dir / "summary.json").read_text())["state"] == "done"
        assert (run_dir / "hf" / "final" / "model.safetensors").is_file()
        steps = records(run_dir, "step")
        assert metric in steps[-1] and steps[0]["resources/trainer/memory_bytes"] > 50e6
        known = {metric.name for metric in STAGE_METRICS} | {"run", "time", "kind", "step", "steps", "rows", "seconds"}
        assert not {key for record in (*steps, *records(run_dir, "eval")) for key in record} - known
    assert guide.run("polyreme sft sft.yaml --resume", folder).startswith("stage supervised")


@pytest.mark.real
def test_a_stage_that_is_asked_to_stop_saves_and_is_resumed(folder: Path) -> None:
    run_dir = folder / "runs" / "supervised"
    constant = ("trainer.optimizer.schedule=constant", "trainer.save_interval=0")
    words = [sys.executable, "-m", "polyreme", "sft", "sft.yaml", "trainer.steps=100000", *constant]
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"}
        )
        try:
            wait_until(lambda: bool(records(run_dir, "step")) or process.poll() is not None, 240)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=240) == 0, (folder / "output").read_text()
        finally:
            process.kill()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "stopped"
    saved = records(run_dir, "saved")[-1]["step"]
    assert saved == records(run_dir, "step")[-1]["step"] == summary["step"]
    refused = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
    assert refused.returncode == 2 and "--resume" in refused.stderr
    guide.run(f"polyreme sft sft.yaml trainer.steps={saved + 3} {' '.join(constant)} --resume", folder)
    assert [record["step"] for record in records(run_dir, "step")] == list(range(1, saved + 4))
    assert json.loads((run_dir / "summary.json").read_text())["state"] == "done"


@pytest.mark.real
@pytest.mark.slow
def test_the_three_steps_continue_after_interruptions_and_reach_their_goal(tmp_path: Path) -> None:
    """The test interrupts the training of the reward model, and then PPO."""
    words = [sys.executable, str(ROOT / "examples" / "three_steps" / "run.py"), "--output", str(tmp_path)]
    moments = [
        lambda: len(records(tmp_path / "three-steps-reward-model", "step")) > 45,
        lambda: len(records(tmp_path / "three-steps-ppo", "iteration")) > 2,
    ]
    with open(tmp_path / "output", "ab") as output:
        for moment in moments:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
            try:
                wait_until(lambda: moment() or process.poll() is not None, 900)  # noqa: B023
                assert process.poll() is None, (tmp_path / "output").read_text()
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=600) == 0, (tmp_path / "output").read_text()
            finally:
                process.kill()
        status = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, timeout=900).returncode
    assert status == 0, (tmp_path / "output").read_text()
    pairs = json.loads((tmp_path / "three-steps-reward-model" / "summary.json").read_text())["eval_after"]
    assert pairs["accuracy"] > 0.95
    before, *_, after = [record["parts"] for record in records(tmp_path / "three-steps-ppo", "eval")]
    assert after["preference"] > before["preference"] + 1
    assert after["rule"] > before["rule"] + 0.2
