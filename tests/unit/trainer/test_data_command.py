"""`polyreme data`: the report and the conversion."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console
from typer.testing import CliRunner
from unit.dataset.test_megatron_files import write_megatron

from polyreme.cli.main import build_app
from polyreme.config.data import DataConfig
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError, DataError
from polyreme_environment.tools.tool_class import declared
from polyreme_trainer.data.prompts import Example
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.data.template import Template
from polyreme_trainer.data_command import check, convert, tokens_text
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run's YAML file with its model and data: four prompts, of which two are equal, one is long and one is also held out."""
    (tmp_path / "model").mkdir()
    for name, content in model_files().items():
        (tmp_path / "model" / name).write_bytes(content)
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "answer": 2},
        {"prompt": "2+2=", "answer": 4},
        {"prompt": "1+1=", "answer": 3},
        {"prompt": "9" * 60},
    ]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "eval.jsonl", rows[1:2])
    write(tmp_path / "sft.jsonl", [{"prompt": "2+2=", "response": "4"}])
    path = tmp_path / "run.yaml"
    path.write_text(
        """
iterations: 1
groups_per_iteration: 1
group_size: 2
model: {path: model}
data: {train: train.jsonl, eval: eval.jsonl, max_prompt_tokens: 32}
rollout: {max_new_tokens: 32, max_model_len: 64}
reward: {rewards: [{name: exact}]}
trainer: {optimizer: {lr: 1.0e-3}}
"""
    )
    return path


def test_the_example_declares_the_tools_of_its_episode(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same tokens as the first turn of an episode has."""
    files = model_files("{{ tools | map(attribute='function.description') | list }}" + CHAT_TEMPLATE)
    for name, content in files.items():
        (config.parent / "model" / name).write_bytes(content)
    plain, tools, train = report(capsys, config), "environment={tools: [calculator, python]}", config.parent / "train.jsonl"
    some = report(capsys, config, tools, f"data.train=[{{path: {train}, tools: [calculator]}}]")
    none = report(capsys, config, tools, f"data.train=[{{path: {train}, tools: []}}]")
    assert "tools" not in plain and none["tools"].startswith("none in the example") and none["example"] == plain["example"]
    template = Template(files, DataConfig(train=config))
    schema = declared(EnvironmentConfig(tools=["calculator"]))["calculator"]
    ids = Tail(template).begin([{"role": "user", "content": "1+1="}], [schema])
    assert some["example"] == "|".join(template.token_texts(ids.tolist())) and some["tools"].startswith(
        "calculator in the example"
    )
    assert report(capsys, config, tools)["tools"].startswith("calculator, python in the example")


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def report(capsys: pytest.CaptureFixture[str], config: Path, *words: object) -> dict[str, str]:
    """The printed report by the first word of each line."""
    check(config, list(map(str, words)))
    return {line[:12].strip(): line[12:] for line in capsys.readouterr().out.splitlines()}


def test_the_report_of_prompts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, config)
    assert found["rows"] == "4"
    assert "at least 6" in found["tokens"] and found["tokens"].endswith("at most 62")
    assert found["overlong"].startswith("1 of more than 32")
    assert found["unlabelled"].startswith("1 ")
    assert found["duplicates"].startswith("1:") and found["duplicates"].endswith("train.jsonl:1")
    assert found["leaks"].startswith("1 ") and found["leaks"].endswith("eval.jsonl:1")
    assert found["example"] == "<user>|1|+|1|=|<assistant>"


def test_leaks_are_counted_for_every_held_out_set(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config.parent / "hard.jsonl", [{"prompt": "1+1="}])
    overrides = [f"eval_sets=[{{name: hard, data: {config.parent / 'hard.jsonl'}}}]"]
    check(config, overrides)
    leaks = [line for line in capsys.readouterr().out.splitlines() if line.startswith("leaks")]
    assert len(leaks) == 2
    assert "data.eval" in leaks[0] and leaks[0].endswith("eval.jsonl:1")
    assert "hard," in leaks[1] and leaks[1].endswith("hard.jsonl:1")


def test_held_out_data_is_not_compared_with_itself(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    assert "leaks" not in report(capsys, config, Path("eval.jsonl"))


def test_a_file_with_other_columns_than_the_held_out_data_is_reported_all_the_same(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(config.parent / "other.jsonl", [{"input": "1+2=", "label": 3}])
    found = report(capsys, config, config.parent / "other.jsonl", "data.prompt_key=input", "data.label_key=label")
    assert found["rows"] == "1" and found["unlabelled"].startswith("0")
    assert found["leaks"].startswith("not checked in data.eval") and "eval.jsonl:1" in found["leaks"]
    with pytest.raises(DataError):
        check(config, ["data.eval=other.jsonl"])


def test_an_override_needs_no_file_before_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config.parent / "train.jsonl", [{"input": "1+2=", "answer": 3}])
    words = ["data", "check", "--config", str(config), "data.prompt_key=input", "data.eval=null"]
    result = CliRunner().invoke(build_app(["data"]), words)
    assert result.exit_code == 0 and result.stdout.startswith("rows"), result.output
    odd = config.parent / "a=b.jsonl"
    write(odd, [{"prompt": "1+2=", "answer": 3}] * 2)
    assert report(capsys, config, odd)["rows"] == "2"


def test_the_report_of_supervised_rows(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, config, config.parent / "sft.jsonl")
    assert found["example"] == "<user>|2|+|2|=|<assistant> [trained:] |4|<eos>"
    assert found["leaks"].startswith("1 ")


def test_prompts_with_a_response_are_reported_as_prompts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, train = report(capsys, config), config.parent / "train.jsonl"
    rows = [json.loads(line) | {"response": "4"} for line in train.read_text().splitlines()]
    write(train, rows)
    assert report(capsys, config) == report(capsys, config, train) == plain
    write(config.parent / "sft.jsonl", rows[:1])
    assert "[trained:]" in report(capsys, config, config.parent / "sft.jsonl")["example"]


def test_the_report_of_a_stage(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(config.parent / "pairs.jsonl", [{"prompt": "1=", "chosen": "2", "rejected": "3"}] * 2)
    stage = config.parent / "stage.yaml"
    stage.write_text(
        """
stage: dpo
model: {path: model}
data: {train: pairs.jsonl, max_tokens: 4}
trainer: {optimizer: {lr: 1.0e-3}, batch_size: 1}
"""
    )
    found = report(capsys, stage)
    assert found["duplicates"] == "1: row 2 as row 1" and found["overlong"].startswith("2 of more than 4")


def test_tokens_are_coloured_where_a_terminal_shows_it() -> None:
    template = Template(model_files(), DataConfig(train=Path()))
    ids = template.encode(["<user>1<assistant>2<eos>"])[0]
    mask = np.array([0, 0, 0, 1, 1], dtype=np.uint8)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(tokens_text(Example(ids, mask), template.token_texts(ids.tolist())))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("1;32;48;5;") == 2  # bold green on grey: the trained tokens


def test_parquet_of_verl_becomes_our_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"data_source": "s", "prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "4"}}
    parquet.write_table(pa.Table.from_pylist([row] * 3), tmp_path / "rows.parquet")
    convert(tmp_path / "rows.parquet", tmp_path / "rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": row["prompt"], "answer": "4", "data_source": "s"}] * 3
    assert "3 rows of the format verl" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="one is there"):
        convert(tmp_path / "rows.parquet", tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="paddlenlp"):
        convert(tmp_path / "rows.parquet", tmp_path / "other.jsonl", "paddlenlp")
    with pytest.raises(ConfigError, match="Choose one"):
        convert(tmp_path / "rows.parquet", tmp_path / "other.jsonl", "unknown")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "rows.parquet"]


def test_a_conversion_into_no_folder_is_refused(config: Path) -> None:
    target = config.parent / "none" / "ours.jsonl"
    with pytest.raises(ConfigError) as error:
        convert(config.parent / "train.jsonl", target)
    assert str(target) in error.value.expected


def test_token_ids_become_texts(config: Path) -> None:
    folder = config.parent
    template = Template(model_files(), DataConfig(train=Path()))
    for key, text in {"input_ids": "<user>1+1=<assistant>", "labels": "2"}.items():
        write_megatron(folder / f"sums_packed_{key}_document", [template.encode([text])[0].tolist()])
    convert(folder / "sums", folder / "sums.jsonl", None, folder / "model")
    assert json.loads((folder / "sums.jsonl").read_text()) == {"prompt": "<user>1+1=<assistant>", "answer": "2"}
    with pytest.raises(ConfigError, match="--model"):
        convert(folder / "sums", folder / "none.jsonl")


BAD_ROWS: dict[str, dict[str, Any]] = {
    "part 1, of type 'image_url'": {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": 1},
    "found null": {"prompt": [{"role": "user", "content": None}], "answer": 1},
    "found 'usr'": {"prompt": [{"role": "usr", "content": "1"}], "answer": 1},
    "1 tools, which this one leaves out": {"prompt": "1", "tools": [{"name": "f"}], "answer": 1},
    "The row has the form gsm8k": {"question": "1", "answer": "1 #### 1"},
}


@pytest.mark.parametrize("complaint", BAD_ROWS)
def test_a_row_that_a_run_would_refuse_is_named(config: Path, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(config.parent / "train.jsonl", [{"prompt": "1", "answer": 1}, BAD_ROWS[complaint]])
    with pytest.raises(DataError, match=r"train\.jsonl:2") as caught:
        report(capsys, config)
    assert complaint in str(caught.value)


def test_a_label_key_that_no_row_has_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="the columns are answer, prompt"):
        report(capsys, config, "data.label_key=gold")


def test_conversations_of_a_warm_start_are_reported(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    write(config.parent / "sft.jsonl", [{"messages": messages * 2}, {"prompt": "3", "response": "4"}])
    found = report(capsys, config, config.parent / "sft.jsonl")
    assert found["rows"] == "2" and "[trained:] |2|<eos> [not trained:] " in found["example"]
