"""A whole run with learner and replica on shared devices: it learns although each is killed once in its own turn."""

import json
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from support.processes import command_line, runs
from support.whole_run import Up, make_task

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]


def test_a_colocated_run_learns_although_learner_and_replica_are_killed(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    changes = ["placement=colocated", "iterations=10", "trainer.save_interval=2", "rollout.vllm.threads=2"]
    up = Up(task, *changes, "trainer.parallel.tensor=1", "trainer.parallel.threads=2")
    up.until(lambda: len(up.records("iteration")) >= 2)
    process_of(up, "polyreme_trainer.learner").kill()
    before = len(up.records("iteration"))
    up.until(lambda: len(up.records("iteration")) >= before + 3)
    process_of(up, "rollout").kill()
    assert up.wait() == 0, up.output
    assert not up.leftovers()

    iterations = up.records("iteration")
    assert {record["iteration"] for record in iterations} == set(range(1, 11))
    assert {record["staleness/max"] for record in iterations} == {0}
    assert all(record["device/peak_bytes"] > 0 and record["time/device_wait"] >= 0 for record in iterations)
    summary = json.loads((up.run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < summary["accuracy_after"]
    assert len(up.records("restart")) >= 2


def process_of(up: Up, word: str) -> psutil.Process:
    """The process below `up` with this word in its command line."""
    there = [process for process in psutil.Process(up.process.pid).children(recursive=True) if runs(process)]
    return next(process for process in there if word in command_line(process))
