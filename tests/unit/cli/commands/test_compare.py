"""The comparison of runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyreme.cli.commands.compare import common_iterations, metric_rows, result_rows, settings_rows
from polyreme.cli.main import build_app
from polyreme.errors import ConfigError
from polyreme.experience.run import RunState
from polyreme.rundir.run_directory import NO_REDIS, RunFile, write_run_file
from polyreme.rundir.run_records import write_summary
from support.recorded_run import record_run


def test_metrics_are_over_the_iterations_that_all_runs_have() -> None:
    long = [{"iteration": number, "reward/mean": float(number)} for number in range(1, 9)]
    short = [{"iteration": number, "reward/mean": 1.0, "kl": None} for number in range(1, 5)]
    first, newest = common_iterations([long, short], last=2)
    assert (first, newest) == (3, 4)
    assert metric_rows([long, short], [(first, newest)] * 2) == {"reward/mean": [3.5, 1.0]}
    assert metric_rows([long, short], [(first, newest)] * 2, names=["kl"]) == {}
    assert common_iterations([long, []], last=2) == (0, 0)


def test_settings_that_differ_have_a_value_per_run() -> None:
    rows = settings_rows([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"b": 1}, "d": [1]}])
    assert rows == {"a.c": [2, 3, None], "d": [None, None, [1]]}


def test_sections_in_a_list_are_compared_key_by_key() -> None:
    one = {"rewards": [{"file": "a.py", "weight": 1.0}], "sizes": [1, 2]}
    other = {"rewards": [{"file": "a.py", "weight": 0.5}, {"file": "b.py"}], "sizes": [1]}
    assert settings_rows([one, other]) == {
        "rewards.0.weight": [1.0, 0.5],
        "rewards.1.file": [None, "b.py"],
        "sizes": [[1, 2], [1]],
    }


def test_results_are_those_that_decide() -> None:
    summaries: list[dict[str, Any]] = [
        {"hard/pass@8_before": None, "hard/pass@8_after": 0.5, "state": "done", "staleness": [1]},
        {"accuracy_before": 0.1, "accuracy_after": 0.2, "state": "done", "rl_seconds": 3.0},
    ]
    rows = result_rows(summaries)
    assert list(rows) == ["state", "hard/pass@8_after", "accuracy_before", "accuracy_after", "rl_seconds"]
    assert rows["hard/pass@8_after"] == [0.5, None]


def test_the_command(tmp_path: Path) -> None:
    first = record_run(tmp_path, "first", iterations=3, group_size=2)
    second = record_run(tmp_path, "second", iterations=2, group_size=4)
    runner, app = CliRunner(), build_app(["compare"])
    found = json.loads(runner.invoke(app, ["compare", str(first), str(second), "--json"]).stdout)
    assert found["config"]["group_size"] == [2, 4]
    assert found["iterations"] == [1, 2]
    assert found["metrics"]["reward/mean"] == pytest.approx([0.15, 0.15])
    assert found["results"]["accuracy_after"] == [0.3, 0.2]
    assert found["evaluations"] == {"version": [3, 2], "accuracy": [0.3, 0.2]}
    text = runner.invoke(app, ["compare", str(first), str(second)]).stdout
    assert "MEAN OF ITERATIONS 1 TO 2  first  second" in text
    assert isinstance(runner.invoke(app, ["compare", str(first)]).exception, ConfigError)
    assert isinstance(runner.invoke(app, ["compare", str(first), str(tmp_path)]).exception, ConfigError)


def test_a_fork_and_its_parent_are_compared_though_they_share_no_iteration(tmp_path: Path) -> None:
    parent, fork = record_run(tmp_path, "first", iterations=3), record_run(tmp_path, "first-fork-1", iterations=5)
    lines = (fork / "metrics.jsonl").read_text().splitlines()
    own = [line for line in lines if json.loads(line).get("iteration", 9) > 3]
    (fork / "metrics.jsonl").write_text("".join(line + "\n" for line in own))
    runner, app = CliRunner(), build_app(["compare"])
    text = runner.invoke(app, ["compare", str(parent), str(fork)]).stdout
    assert "no iteration in common" in text and "MEAN OF ITERATIONS 1 TO 3, 4 TO 5" in text and "0.2" in text and "0.45" in text
    found = json.loads(runner.invoke(app, ["compare", str(parent), str(fork), "--json"]).stdout)
    assert found["own_iterations"] == [[1, 3], [4, 5]]
    assert found["metrics"]["reward/mean"] == pytest.approx([0.2, 0.45])


def test_stages_are_compared_by_their_steps_and_flat_results(tmp_path: Path) -> None:
    folders = []
    for name, loss in (("one", 2.0), ("two", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        write_run_file(folder, RunFile(f"{name}-1", NO_REDIS))
        evaluation = {"step": 2, "rows": 3, "loss": loss, "rewards/margins": 0.5}
        write_summary(
            folder, f"{name}-1", RunState.DONE, "", {"step": 2, "loss": loss, "eval_before": None, "eval_after": evaluation}
        )
        steps = [{"run": f"{name}-1", "kind": "step", "step": number, "loss": loss * number, "time": 1.0} for number in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        folders.append(str(folder))
    text = CliRunner().invoke(build_app(["compare"]), ["compare", *folders]).stdout
    assert "eval_after.loss" in text and "MEAN OF STEPS 1 TO 2" in text and "{" not in text
    assert max(map(len, text.splitlines())) < 80
    assert ["loss", "3", "1.5"] in [line.split() for line in text.splitlines()]
