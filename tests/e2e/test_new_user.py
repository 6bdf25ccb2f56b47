"""A new user's path with real parts: init, up, the commands that look at a run, chat. No file of the project is read on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import guide


@pytest.mark.real
def test_from_nothing_to_a_conversation(tmp_path: Path) -> None:
    def command(line: str, seconds: float = 600) -> str:
        return guide.run(line, tmp_path, seconds)

    command("polyreme init letters --model tiny --data sample --reward python --device cpu")
    assert "checks         passed" in command("polyreme config check letters/run.yaml")
    report = command("polyreme up letters/run.yaml iterations=3 trainer.sft.0.steps=20")
    run_dir = tmp_path / "letters" / "runs" / "letters"
    assert f"polyreme samples {run_dir}" in report
    assert int((run_dir / "hf" / "best" / "policy_version").read_text()) in (0, 3)
    assert "3/3" in command("polyreme status letters/runs")
    assert "serving version 3" in command(f"polyreme logs {run_dir} rollout")
    samples = [json.loads(line) for line in command(f"polyreme samples {run_dir} --iteration : --json").splitlines()]
    assert len(samples) == 3 * 16 * 8
    script = f"import polyreme; run = polyreme.Run({str(run_dir)!r}); print(len(run.records('iteration')))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300).stdout == "3\n"
    model = run_dir / "hf" / "iteration-000003"
    result = command(f"polyreme eval letters/run.yaml --model {model} eval_answers=2 eval_samples=16 --json 2> eval.log")
    found = json.loads(result.splitlines()[-1])
    assert found["model"] == str(model) and found["samples"] == 16
    assert 0 <= found["majority@2"] <= found["best@2"] <= 1
    assert not (Path(found["run_dir"]) / "checkpoints").exists()
    answers = command(f"polyreme chat {run_dir} --compare 0 -m 'vowels for tom'").splitlines()
    assert [line.partition("> ")[0] for line in answers if "> " in line] == ["iteration-000003", "iteration-000000"]
