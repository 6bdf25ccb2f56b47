"""A whole run whose generation overlaps training, with partial rollouts. It learns within its staleness bound, across swaps within
answers and pauses between their parts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.whole_run import Up, make_task

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

LEAD = "0123456789" * 6 + "#"
"""Start of every answer, so long that weights are swapped during some answers. Only the text after the # counts."""


def test_an_asynchronous_run_learns_within_its_bound(tmp_path: Path) -> None:
    task = make_task(tmp_path, LEAD)
    changes = [
        "max_staleness=2",
        "rollout.tokens_per_iteration=24",
        "iterations=16",
        "eval_interval=6",
        "trainer.optimizer.lr=3e-4",
    ]
    up = Up(task, *changes, 'reward.rewards.0.options={after: "#"}')
    assert up.wait() == 0, up.output
    assert not up.leftovers()

    iterations = up.records("iteration")
    rewards = [record["reward/mean"] for record in iterations]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3, rewards
    assert {record["staleness/max"] for record in iterations} <= {0, 1, 2}
    assert sum(record["staleness/mean"] for record in iterations) > 0, "generation never overlapped training"
    assert any(record["staleness/mixed_fraction"] > 0 for record in iterations), "no answer went on over a swap"
    assert all(sum(record["staleness/samples"]) == 64 for record in iterations)
    assert all(0 < record["importance/weight_mean"] <= 2 for record in iterations)
    measured = [record["mismatch_kl"] for record in iterations if record["mismatch_kl"] is not None]
    assert measured and max(measured) < 1e-4
    rollouts = up.records("rollout")
    assert [record["iteration"] for record in rollouts] == list(range(1, 17))
    assert sum(record["rollout/paused_samples"] for record in rollouts) > 0, "no answer spent its budget"
    assert sum(record["partial/carried_samples"] for record in iterations) > 0
    assert max(record["partial/parts_max"] for record in iterations) <= 3
    assert all((record["partial/carried_tokens"] > 0) == (record["partial/carried_samples"] > 0) for record in iterations)

    assert [record["version"] for record in up.records("eval")] == [0, 6, 12, 16], up.records("eval_failed")
    summary = json.loads((up.run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < summary["accuracy_after"]
    assert summary["alarms"] == []
    for path in sorted((up.run_dir / "samples").glob("iteration_*.jsonl")):
        for sample in map(json.loads, path.read_text().splitlines()):
            starts, ends = [span[1] for span in sample["spans"]], [span[2] for span in sample["spans"]]
            assert (starts[0], ends[-1], starts[1:]) == (0, sample["tokens"], ends[:-1])
    audit = [sys.executable, "-m", "polyreme", "audit", str(up.run_dir)]
    assert subprocess.run(audit, capture_output=True, timeout=300).returncode == 0
