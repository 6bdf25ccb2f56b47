"""Every combination of data and reward that `polyreme init` offers for its tiny model learns, on the real stack."""

import json
from pathlib import Path

import pytest

from polyreme.cli.new_run.files import REWARDS
from polyreme.rundir.run_records import read_summary
from support import guide
from support.whole_run import Up

pytestmark = [pytest.mark.real, pytest.mark.slow]


def learns(folder: Path, *words: str) -> None:
    """Creates a run and trains it. Its result on the held-out prompts is clearly better than before."""
    guide.run(f"polyreme init {folder} --name run {' '.join(words)}", folder.parent)
    up = Up(folder / "run.yaml")
    assert up.wait(3600) == 0, up.output
    summary = read_summary(up.run_dir)
    [metric] = [name.removesuffix("_before") for name in summary if name.endswith("_before")]
    before, after = summary[f"{metric}_before"], summary[f"{metric}_after"]
    assert after > before + 0.15 and summary["not_learned"] == [], up.output
    assert "nothing was learned" not in up.output


@pytest.mark.parametrize("reward", REWARDS)
def test_sample_data(tmp_path: Path, reward: str) -> None:
    learns(tmp_path / "new", "--model tiny --data sample --reward", reward)


def test_an_environment(tmp_path: Path) -> None:
    learns(tmp_path / "new", "--model tiny --environment")


def test_own_data(tmp_path: Path) -> None:
    """Every answer is one of two numbers, which the first number of the prompt decides."""
    rows = [{"question": f"{number % 2} or {number}?", "solution": number % 2 + 3} for number in range(600)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learns(tmp_path / "new", f"--model tiny --data {tmp_path / 'own.jsonl'} --reward numeric")


def test_a_run_that_cannot_learn_says_so_and_why(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    guide.run(f"polyreme init {folder} --name run --model tiny --data sample --reward exact", tmp_path)
    up = Up(folder / "run.yaml", "reward.rewards=[{name: exact, weight: 0}]", "iterations=12")
    assert up.wait(3600) == 0, up.output
    assert "nothing was learned" in up.output and "every answer scored 0" in up.output
    assert len(read_summary(up.run_dir)["not_learned"]) == 2
