"""A new user's path with real parts: init, own data in Parquet, own reward, up, the page, report, chat. It reads no file of the
repository."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from support import guide

REWARD = """
def reward(response, label):
    return sum(letter in label for letter in response) / max(1, len(response))
"""


def bring_own(folder: Path) -> None:
    """Changes the files of `init` as a user would: the data with its columns, and the reward."""
    kinds = {"vowels": "aeiouy", "early": "abcdefgh"}
    rows = [(f"{kind} for {a}{b}{c}", letters) for kind, letters in kinds.items() for a in "tom" for b in "toms" for c in "tomsk"]
    prompts, letters = zip(*rows, strict=True)
    parquet.write_table(pyarrow.table({"prompt": prompts, "letters": letters}), folder / "mine.parquet")
    (folder / "reward.py").write_text(REWARD)
    text = (folder / "run.yaml").read_text()
    for old, new in {
        "train: train.jsonl": "train: mine.parquet",
        "eval: eval.jsonl": "eval: mine.parquet",
        "label_key: answer": "label_key: letters",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "run.yaml").write_text(text)


def page_of(run_dir: Path) -> str:
    """Fetches the page from `polyreme ui`."""
    words = [sys.executable, "-m", "polyreme", "ui", str(run_dir), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
            with urllib.request.urlopen(address, timeout=300) as reply:
                return str(reply.read().decode())
        finally:
            process.terminate()


@pytest.mark.real
def test_from_nothing_to_a_conversation(tmp_path: Path) -> None:
    def command(line: str, seconds: float = 600) -> str:
        return guide.run(line, tmp_path, seconds)

    command("polyreme init letters --model tiny --data sample --reward python --device cpu")
    bring_own(tmp_path / "letters")
    assert re.search(r"rows +120\n", command("polyreme data check letters/mine.parquet --config letters/run.yaml"))
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
    result = command(
        f"polyreme eval letters/run.yaml --model {model} eval_answers=2 eval_samples=16 rollout.engine=transformers --json 2> eval.log"
    )
    found = json.loads(result.splitlines()[-1])
    assert found["model"] == str(model) and found["samples"] == 16
    assert 0 <= found["majority@2"] <= found["best@2"] <= 1
    assert not (Path(found["run_dir"]) / "checkpoints").exists()
    assert "<html" in page_of(run_dir)
    command(f"polyreme report {run_dir} --out report.html")
    assert "reward/mean" in (tmp_path / "report.html").read_text()
    answers = command(f"polyreme chat {run_dir} --compare 0 -m 'vowels for tom'").splitlines()
    assert [line.partition("> ")[0] for line in answers if "> " in line] == ["iteration-000003", "iteration-000000"]
