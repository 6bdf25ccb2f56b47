"""`polyreme reward test` reads files as a run reads its data, and prints complete answers."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyreme.config.data import DataConfig
from polyreme.config.load import data_columns, load_config
from polyreme.config.reward import RewardConfig
from polyreme.errors import DataError
from polyreme_reward import reward_test
from polyreme_reward.reward_test import read_items, shown_part
from polyreme_reward.scorer import Part
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.template import Template
from support.tiny_tokenizer import model_files

MESSAGES = [{"role": "system", "content": "add"}, {"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
ROWS: list[dict[str, Any]] = [
    {"question": "1+2=", "answer": 3, "level": 2},
    {"question": ["1+2="], "answer": ["3"]},
    {"question": MESSAGES, "answer": "2"},
    {"question": "1=", "answer": None, "label": "a column of its own"},
]


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return path


def test_rows_mean_what_they_mean_in_a_run(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"response": "a\u2028b", "label": 42},
        {"response": "", "label": ["x"]},
        {"response": "r", "label": None},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    assert [(item.response, item.label) for item in read_items(path)] == [("a\u2028b", "42"), ("", "x"), ("r", None)]


def test_a_reward_gets_the_texts_and_columns_of_a_run(tmp_path: Path) -> None:
    rows = ROWS
    data = DataConfig(train=tmp_path / "unused", prompt_key="question", label_key="answer")
    trained = load_prompts(write(tmp_path / "train.jsonl", rows), data, Template(model_files(), data)).prompts
    tried = list(read_items(write(tmp_path / "tried.jsonl", [{**row, "response": "r"} for row in rows]), ("question", "answer")))
    assert [(item.prompt, item.label, json.loads(item.metadata_json)) for item in tried] == [
        (prompt.plain, prompt.label or None, json.loads(prompt.metadata_json)) for prompt in trained
    ]
    assert all(prompt.plain != prompt.text for prompt in trained)


def test_the_prompt_of_messages_is_the_last_one_by_the_user(tmp_path: Path) -> None:
    (item,) = read_items(write(tmp_path / "rows.jsonl", [{"prompt": MESSAGES, "response": "2"}]))
    assert (item.prompt, item.metadata["prompt"]) == ("1+1=", MESSAGES)


def test_a_templated_prompt_may_be_given(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "templated_prompt": "<user>1+1=<assistant>", "response": "2"}
    (item,) = read_items(write(tmp_path / "rows.jsonl", [row]))
    assert (item.seen, item.metadata) == ("<user>1+1=<assistant>", {"prompt": "1+1="})


def test_tokens_may_be_given(tmp_path: Path) -> None:
    row = {"response": "23", "token_ids": [9, 10], "token_texts": ["2", "3"]}
    (item,) = read_items(write(tmp_path / "rows.jsonl", [row]))
    assert (item.token_ids, item.token_texts, item.metadata) == ((9, 10), ("2", "3"), {})


@pytest.mark.parametrize(
    "row", [{"token_ids": [1]}, {"token_ids": "1", "token_texts": "1"}, {"token_ids": ["1"], "token_texts": ["1"]}]
)
def test_tokens_that_do_not_fit_are_refused(tmp_path: Path, row: dict[str, object]) -> None:
    with pytest.raises(DataError, match="token_texts"):
        list(read_items(write(tmp_path / "rows.jsonl", [{"response": "r", **row}])))


@pytest.mark.parametrize("row", [{"response": "r", "label": {"a": 1}}, {"response": "r", "prompt": 3}, {"response": 3}])
def test_a_column_that_is_not_text_is_reported_with_its_line(tmp_path: Path, row: dict[str, object]) -> None:
    path = write(tmp_path / "rows.jsonl", [{"response": "r"}, row])
    with pytest.raises(DataError, match=r"text .*rows.jsonl:2"):
        list(read_items(path))


def test_the_columns_are_those_of_the_run(tmp_path: Path) -> None:
    (alone := tmp_path / "rewards.yaml").write_text("reward: {rewards: [{name: exact}]}\n")
    assert data_columns(alone) == ("prompt", "label")
    example = Path(__file__).parents[3] / "examples" / "running_total" / "run.yaml"
    data = load_config(example, ["data.prompt_key=question"]).data
    (run := tmp_path / "run.yaml").write_text(example.read_text().replace("data:", "data:\n  prompt_key: question", 1))
    assert data_columns(run) == ("question", data.label_key)


def test_a_part_shows_what_its_weight_makes_of_it() -> None:
    assert shown_part(Part("exact", 0.5, 0.5, "v")) == "0.5"
    assert shown_part(Part("shape", 0.5, 0.1, "v")) == "0.5 (0.1)"


async def test_names_and_messages_are_whole_in_a_narrow_terminal(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"response": "a b", "label": "1"}, {"response": "a"}])
    names = ["exact", "repetition", "think_format", "length"]
    config = RewardConfig.model_validate({"rewards": [{"name": name} for name in names]})
    console = Console(file=io.StringIO(), width=40)
    assert await reward_test.test_rewards(config, path, console) == 1
    assert isinstance(console.file, io.StringIO)
    first, response, label, second, _, message, _ = console.file.getvalue().splitlines()
    assert all(f" {name} " in first for name in ["OK", "score", *names])
    assert (response.split(), label.split()) == (["response", "a", "b"], ["label", "1"])
    assert first.index("length") == second.index("length")
    assert "score none" in second and message.split()[:2] == ["message", "exact:"]
