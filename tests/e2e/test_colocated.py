"""Whole runs with learner and replica on shared devices: they learn although each side is killed once."""

import json
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
def test_a_run_whose_engine_ends_in_every_turn_trains_the_same_although_both_sides_are_killed(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    changes = ["placement=colocated", "iterations=4", "trainer.save_interval=1", "trainer.parallel.tensor=1"]
    pauses = Up(task, *changes, "name=pauses")
    assert pauses.wait() == 0, pauses.output

    ends = Up(task, *changes, "name=ends", "rollout.cpu_sleep=end")
    ends.until(lambda: len(ends.records("iteration")) >= 1)
    process_of(ends, "polyreme_trainer.learner").kill()
    ends.until(lambda: len(ends.records("iteration")) >= 2)
    turns = len(started(ends))
    ends.until(lambda: len(started(ends)) > turns)
    process_of(ends, "rollout").kill()  # in its turn
    assert ends.wait() == 0, ends.output
    assert not ends.leftovers()

    expected = {record["iteration"]: record for record in pauses.records("iteration")}
    trained = ends.records("iteration")
    assert {record["iteration"] for record in trained} == expected.keys() == set(range(1, 5))
    for record in trained:
        for name in ("reward/mean", "grad_norm", "actor/pg_loss", "response_length/mean"):
            assert record[name] == pytest.approx(expected[record["iteration"]][name], rel=1e-3, abs=1e-6), (
                name,
                record["iteration"],
            )
        assert record["staleness/max"] == 0 and record["device/peak_bytes"] > 0
    summary = json.loads((ends.run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < summary["accuracy_after"]

    turns_over = ends.records("engine_end")
    assert len(turns_over) >= 4 and all(record["freed_bytes"] > 200 << 20 for record in turns_over)
    processes = {record["pid"] for record in ends.records("engine_start")}
    lines = ends.output.splitlines()
    assert 2 <= len(processes) == len([line for line in lines if " starts on " in line]) < len(turns_over)
    assert not [line for line in lines if line.startswith("learner: replica")]


def started(up: Up) -> list[dict[str, Any]]:
    """The records of the engines that have started."""
    return [record for record in up.records("engine_start") if "seconds" in record]


def process_of(up: Up, word: str) -> psutil.Process:
    """The process below `up` with this word in its command line."""
    there = [process for process in psutil.Process(up.process.pid).children(recursive=True) if runs(process)]
    return next(process for process in there if word in command_line(process))
