"""The samples that a filter selects."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyreme.cli.commands.samples import sample_text
from polyreme.cli.main import build_app
from polyreme.errors import ConfigError
from polyreme.rundir.reader import RunReader, SampleQuery, parse_range
from polyreme.rundir.run_directory import NO_REDIS, RunFile, write_run_file
from support.recorded_run import record_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("samples"))


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (SampleQuery("train"), 3 * 4 * 2),
        (SampleQuery("train", first=2, last=3), 2 * 4 * 2),
        (SampleQuery("train", score_min=0.5), 3 * 4),
        (SampleQuery("train", tokens_min=2, tokens_max=2), 8),  # the right ones of iteration 2, the wrong ones of iteration 1
        (SampleQuery("train", text="QUESTION 7?"), 2),
        (SampleQuery("train", text="answer 7: right"), 1),
        (SampleQuery("train", finish="length"), 0),
        (SampleQuery("train", text="none"), 0),
    ],
)
def test_a_filter_selects(run_dir: Path, chosen: SampleQuery, count: int) -> None:
    reader = RunReader(run_dir)
    reader.refresh()
    found = list(reader.read_samples(replace(chosen, order="oldest")))
    assert len(found) == count == reader.find_samples(chosen)[0]
    assert [sample["iteration"] for sample in found] == sorted(sample["iteration"] for sample in found)


def test_a_damaged_line_is_named(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "damaged", ignore=shutil.ignore_patterns("index.sqlite*"))
    path = tmp_path / "damaged" / "samples" / "iteration_0002.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:1]) + "{}\n")
    with pytest.raises(ConfigError) as error:
        RunReader(tmp_path / "damaged").refresh()
    assert f"line 2 of {path}" in error.value.expected


@pytest.mark.parametrize(("text", "wanted"), [("5", (5, 5)), ("3:10", (3, 10)), ("3:", (3, None)), (":0.5", (None, 0.5))])
def test_a_range(text: str, wanted: tuple[float | None, float | None]) -> None:
    assert parse_range(text) == wanted


def test_the_command_prints_the_newest_iteration_and_the_files_own_lines(run_dir: Path) -> None:
    runner, app = CliRunner(), build_app(["samples"])
    newest = runner.invoke(app, ["samples", str(run_dir), "--limit", "1"])
    assert newest.stdout.splitlines()[0] == "iteration 3, group 8: reward 1, 3 tokens, stop"
    piped = runner.invoke(app, ["samples", str(run_dir), "--iteration", "1:2", "--reward", "1", "--json"])
    lines = [json.loads(line) for line in piped.stdout.splitlines()]
    assert len(lines) == 8
    assert lines[0] == json.loads((run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()[0])
    empty = runner.invoke(app, ["samples", str(run_dir), "--reward", "7"])
    assert empty.stdout == "no samples match\n"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("reward", "good"),
        ("reward", "nan"),
        ("iteration", "nan"),
        ("iteration", "2.5"),
        ("iteration", "1e30"),
        ("tokens", "3:inf"),
    ],
)
def test_what_is_no_range_is_refused(run_dir: Path, option: str, text: str) -> None:
    result = CliRunner().invoke(build_app(["samples"]), ["samples", str(run_dir), f"--{option}", text])
    assert isinstance(result.exception, ConfigError) and repr(text) in result.exception.found


def test_an_answer_of_an_evaluation_names_its_version() -> None:
    part = {"raw": 1.0, "weighted": 0.5}
    sample = {"version": 4, "prompt": "a", "response": "b\nc", "label": "d", "score": 1.0, "tokens": 3, "finish_reason": "stop"}
    lines = sample_text({**sample, "parts": {"x": part, "y": part}})
    assert lines[0] == "version 4: reward 1 (x 1, y 1), 3 tokens, stop"
    assert "b c" in lines[2]


def test_an_episode_is_a_conversation_with_its_turns() -> None:
    call = {"name": "add", "arguments": '{"a": 1}', "result": "3", "seconds": 0.1, "error": ""}
    failed = {**call, "name": "div", "result": "", "error": "division by zero"}
    turns = [{"start": 0, "end": 2, "reward": 0.5, "seconds": 0.1, "tool_calls": [call, failed]}]
    turns.append({"start": 4, "end": 5, "reward": 0.0, "seconds": 0.1, "tool_calls": []})
    said = [
        ("user", "an example"),
        ("assistant", "shown"),
        ("user", "task"),
        ("assistant", "first"),
        ("tool", "3"),
        ("assistant", "last"),
    ]
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in said]
    messages[3] |= {"trajectory": 0, "turn": 0}
    messages[5] |= {"trajectory": 0, "turn": 1}
    sample = {"iteration": 1, "group": 2, "score": 0.5, "parts": {}, "tokens": 3, "finish_reason": "stop", "label": "x"}
    lines = sample_text({**sample, "outcome": "turns", "turns": turns, "messages": messages})
    assert lines[0] == "iteration 1, group 2: reward 0.5, 3 tokens, turns"
    assert [line.split() for line in lines[1:5]] == [[*f"{role} {content}".split()] for role, content in said[:4]]
    assert lines[5:8] == ['    add({"a": 1}): 3', '    div({"a": 1}): division by zero', "    reward 0.5"]
    assert lines[8:] == ["  tool      3", "  assistant last", "  label     x"]


def test_the_first_samples_are_of_different_prompts(run_dir: Path) -> None:
    """Those of a group would all be answers to one prompt."""
    runner, app = CliRunner(), build_app(["samples"])
    lines = runner.invoke(app, ["samples", str(run_dir), "--limit", "5"]).stdout.splitlines()
    prompts = [line.split()[-1] for line in lines if line.startswith("  prompt")]
    assert len(set(prompts[:4])) == 4 and prompts[4] == prompts[0]
    assert lines[-1].startswith("5 of 8 samples: one of each prompt")
    whole = runner.invoke(app, ["samples", str(run_dir), "--limit", "8"]).stdout.splitlines()
    assert not whole[-1].startswith("8 of")


def test_a_stage_has_no_samples(tmp_path: Path) -> None:
    write_run_file(tmp_path, RunFile("sft-1", NO_REDIS))
    (tmp_path / "config.yaml").write_text("stage: sft\n")
    result = CliRunner().invoke(build_app(["samples"]), ["samples", str(tmp_path)])
    assert isinstance(result.exception, ConfigError) and "a stage" in result.exception.found
