"""The examples with an environment: they play, call their tools, and reach their documented results."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.environment import PythonLimits
from polyreme.net.ports import free_port
from polyreme_environment.tools.python import python_tool
from support.own_venv import own_venv

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]


def prepared(folder: Path, example: str) -> Path:
    """A copy of an example with its data. Returns its run.yaml."""
    shutil.copytree(EXAMPLES / example, folder / example, ignore=shutil.ignore_patterns("data", "__pycache__"))
    shutil.copy(EXAMPLES / "tiny_chat.py", folder)
    subprocess.run([sys.executable, str(folder / example / "prepare.py")], check=True, timeout=600)
    return folder / example / "run.yaml"


def trained(folder: Path, example: str, *overrides: str) -> tuple[Path, list[dict[str, Any]]]:
    """Runs an example in a copy. Returns its run directory and the records of its iterations."""
    if not (folder / example).exists():
        prepared(folder, example)
    command = [sys.executable, "-m", "polyreme", "up", str(folder / example / "run.yaml"), f"output_dir={folder}", *overrides]
    subprocess.run(command, check=True, timeout=1800, env={**os.environ, "COLUMNS": "120"})
    (run_dir,) = folder.glob("*/run.json")
    records = map(json.loads, (run_dir.parent / "metrics.jsonl").read_text().splitlines())
    subprocess.run([sys.executable, "-m", "polyreme", "audit", str(run_dir.parent)], check=True, timeout=300)
    return run_dir.parent, [record for record in records if record["kind"] == "iteration"]


def test_calls_of_tools_stand_in_the_samples(tmp_path: Path) -> None:
    run_dir, (first, second) = trained(
        tmp_path, "calculator", "iterations=2", "groups_per_iteration=8", "rollout.engine=transformers"
    )
    for record in (first, second):
        assert 0 < record["episode/tool_calls"] <= 2
        assert record["episode/tool_seconds"] > 0
        assert record["mismatch_kl"] < 1e-4, "the learner sees the tokens that were sampled"
    samples = [json.loads(line) for line in (run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()]
    called = 0
    for sample in samples:
        calls = [call for turn in sample["turns"] for call in turn["tool_calls"]]
        results = [message["content"] for message in sample["messages"] if message["role"] == "tool"]
        assert results == [call["result"] for call in calls][: len(results)], (
            "the last turn's results are not shown to the policy"
        )
        called += len(calls)
    assert called == round(first["episode/tool_calls"] * len(samples))


@pytest.mark.slow
def test_the_calculator_is_at_hand_without_an_environment(tmp_path: Path) -> None:
    run = prepared(tmp_path, "calculator")
    for file in ("prepare.py", "calculator.py"):  # the warm start teaches the name and description of the tool that is built in
        text = (run.parent / file).read_text().replace('"calculate"', '"calculator"').replace("calculate: ", "calculator: ")
        text = text.replace("Calculates.", "Calculates the value of an arithmetic expression.")
        (run.parent / file).write_text(text)
    subprocess.run([sys.executable, str(run.parent / "prepare.py")], check=True, timeout=600)
    tools = ("environment={tools: [calculator], max_turns: 3}", "reward={rewards: [{name: exact}]}")
    run_dir, records = trained(tmp_path, "calculator", *tools, "iterations=2", "groups_per_iteration=8")
    assert all(record["episode/tool_calls"] > 0 and record["mismatch_kl"] < 1e-4 for record in records)
    samples = [json.loads(line) for line in (run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()]
    calls = [call for sample in samples for turn in sample["turns"] for call in turn["tool_calls"] if not call["error"]]
    assert calls and all(float(call["result"]).is_integer() for call in calls)
    assert {sample["score"] for sample in samples} == {0.0, 1.0}, "the reward compares the last answer with the row's"


@pytest.mark.slow
def test_rows_with_python_and_rows_without_train_together(tmp_path: Path) -> None:
    run = prepared(tmp_path, "calculator")
    about = python_tool(PythonLimits().model_dump()).schema["function"]["description"]  # type: ignore[attr-defined]
    for file in ("prepare.py", "calculator.py"):  # the warm start teaches the tool that is built in: an expression is code, too
        text = (run.parent / file).read_text().replace('"calculate"', '"python"').replace("calculate: ", "python: ")
        text = text.replace("Calculates.", about).replace('"expression":', '"code":').replace("expression: two", "code: two")
        (run.parent / file).write_text(text.replace("expression: str", "code: str").replace("(expression)", "(code)"))
    subprocess.run([sys.executable, str(run.parent / "prepare.py")], check=True, timeout=600)
    sources, tasks = [], (run.parent / "data" / "tasks.jsonl").read_text().splitlines()
    for name, tools in (("sums", "[python]"), ("others", "[]")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(row for row in tasks if ("+" in row) == (name == "sums")))
        sources.append(f"{{path: {file}, tools: {tools}, weight: 1}}")
    sections = ("environment={tools: [python], max_turns: 3}", "reward={rewards: [{name: exact}]}")
    over = (*sections, f"data.train=[{', '.join(sources)}]", "iterations=2", "groups_per_iteration=16")
    run_dir, records = trained(tmp_path, "calculator", *over)
    assert all(record["episode/tool_calls"] > 0 and record["mismatch_kl"] < 1e-4 for record in records)
    samples = [json.loads(line) for line in (run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()]
    calls = {
        key: [call for each in samples if ("+" in each["prompt"]) is key for turn in each["turns"] for call in turn["tool_calls"]]
        for key in (True, False)
    }
    assert calls[True] and not calls[False] and {"+" in sample["prompt"] for sample in samples} == {True, False}
    right = [call for call in calls[True] if not call["error"]]
    assert right and all(float(call["result"]) == eval(json.loads(call["arguments"])["code"]) for call in right)
    assert {sample["score"] for sample in samples} == {0.0, 1.0}


@pytest.mark.slow  # installs the package
def test_the_game_is_played_over_openenv(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    port, commands = free_port(), own_venv("openenv", tmp_path_factory.mktemp("openenv"))
    server = subprocess.Popen([commands / "python", EXAMPLES / "guess_number" / "openenv_server.py", str(port)])
    try:
        over = f"environment={{openenv: 'http://127.0.0.1:{port}', options: {{answer: $answer}}, max_turns: 4}}"
        run_dir, records = trained(tmp_path, "guess_number", over, "iterations=2", "groups_per_iteration=8")
    finally:
        server.terminate()
        server.wait(30)
    check_games(run_dir, records)


@pytest.mark.slow  # installs the package
def test_the_game_is_played_by_verifiers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = own_venv("verifiers", tmp_path_factory.mktemp("verifiers")).parent
    run = prepared(tmp_path, "guess_number")
    monkeypatch.setenv("PYTHONPATH", str(run.parent))
    options = "options: {player: {runtime: {type: subprocess}}}, max_turns: 4, correctness: true, start_timeout: 240"
    over = (f"data.train={tmp_path / 'games.jsonl'}", f"environment={{verifiers: guess_verifiers, venv: {venv}, {options}}}")
    subprocess.run([sys.executable, "-m", "polyreme", "environment", "tasks", run, *over], check=True, timeout=300)
    held_out = f"eval_sets=[{{name: games, data: {tmp_path / 'games.jsonl'}, answers: 4}}]"
    run_dir, records = trained(
        tmp_path, "guess_number", *over, held_out, "eval_best=games/pass@4", "iterations=2", "groups_per_iteration=8"
    )
    check_games(run_dir, records)
    check_pass_rates(run_dir, 9, 4)
    assert all(1 <= record["reward/environment/guesses"] <= 4 for record in records)


@pytest.mark.slow  # installs the package
def test_the_game_is_played_by_nemo_gym(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    venv = own_venv("nemo-gym", tmp_path_factory.mktemp("nemo-gym"), "python3.13").parent
    run = prepared(tmp_path, "guess_number")
    section = f"nemo_gym: {run.parent / 'guess_gym.yaml'}, venv: {venv}, max_turns: 4, start_timeout: 240"
    over = (f"data.train={tmp_path / 'games.jsonl'}", f"environment={{{section}}}")
    subprocess.run([sys.executable, "-m", "polyreme", "environment", "tasks", run, *over], check=True, timeout=300)
    run_dir, records = trained(tmp_path, "guess_number", *over, "iterations=2", "groups_per_iteration=8")
    check_games(run_dir, records)


def check_pass_rates(run_dir: Path, tasks: int, answers: int) -> None:
    """Checks the evaluations before and after two iterations: each task is played `answers` times, and what is told of it follows from that."""
    records = [
        record for line in (run_dir / "metrics.jsonl").read_text().splitlines() if (record := json.loads(line))["kind"] == "eval"
    ]
    assert [record["version"] for record in records] == [0, 2]
    for record in records:
        lines = (run_dir / "samples" / f"evaluation_{record['version']:04d}.jsonl").read_text().splitlines()
        scores = [json.loads(line)["score"] for line in lines]
        played = [scores[start : start + answers] for start in range(0, len(scores), answers)]
        assert len(played) == tasks and set(scores) == {0.0, 1.0}
        assert record["games/accuracy"] == record["games/pass@1"] == pytest.approx(sum(scores) / len(scores))
        assert record[f"games/pass@{answers}"] == pytest.approx(sum(map(max, played)) / tasks)


def check_games(run_dir: Path, records: list[dict[str, Any]]) -> None:
    """Checks the games of a run: exact tokens, hints as messages, and a reward at the right number."""
    assert all(1 < record["episode/turns/mean"] <= 4 and record["mismatch_kl"] < 1e-4 for record in records)
    samples = [json.loads(line) for line in (run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()]
    for sample in samples:
        hints = [message["content"] for message in sample["messages"][2::2]]
        assert set(hints) <= {"higher", "lower", "number"} and sample["score"] in (0.0, 1.0)
        assert sample["score"] == sum(turn["reward"] for turn in sample["turns"])
    assert {sample["score"] for sample in samples} == {0.0, 1.0}


@pytest.mark.slow
def test_the_policy_learns_to_use_the_calculator(tmp_path: Path) -> None:
    _, records = trained(tmp_path, "calculator")
    assert records[0]["reward/mean"] < 0.4 and records[-1]["reward/mean"] > 0.9
    assert records[0]["episode/tool_calls"] < 0.5 and records[-1]["episode/tool_calls"] > 0.9


@pytest.mark.slow
def test_the_policy_learns_to_guess(tmp_path: Path) -> None:
    _, records = trained(tmp_path, "guess_number")
    assert records[0]["reward/mean"] < 0.6 and records[-1]["reward/mean"] > 0.85
