"""A column of reference answers that no row has is an error, and rows without an answer are counted."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.data import DataConfig
from polyreme.config.model import ModelConfig
from polyreme.config.reward import RewardConfig
from polyreme.errors import DataError, PolyremeError
from polyreme_reward import checks as reward_checks
from polyreme_trainer import checks
from polyreme_trainer.data.prompts import Dataset, load_prompts
from polyreme_trainer.data.template import Template
from support.configs import run_config
from support.models import tiny_model
from support.tiny_tokenizer import model_files


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def prompts(path: Path, **fields: Any) -> Dataset:
    data = DataConfig(train=path, **fields)
    return load_prompts(path, data, Template(model_files(), data))


def test_a_label_key_that_no_row_has_names_the_columns_that_exist(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", {"prompt": "1=", "answer": "1", "reward_model": {"ground_truth": "1"}}, {"prompt": "2="}
    )
    with pytest.raises(DataError) as caught:
        prompts(path, label_key="anwser")
    assert "anwser" in caught.value.expected
    assert caught.value.found == "none of 2 rows with it; the columns are answer, prompt, reward_model.ground_truth"
    with pytest.raises(DataError, match=r"reward_model\.truth"):
        prompts(path, label_key="reward_model.truth")
    assert [prompt.label for prompt in prompts(path, label_key="reward_model.ground_truth").prompts] == ["1", ""]


def test_data_without_answers_needs_none(tmp_path: Path) -> None:
    found = prompts(write(tmp_path / "rows.jsonl", {"prompt": "1="}))
    assert (found.prompts[0].label, found.unlabelled) == ("", 0)
    turns = write(tmp_path / "turns.jsonl", {"src": ["1=", "2="], "tgt": ["1"]})
    assert prompts(turns, prompt_key="src", label_key="tgt").prompts[0].label == ""


def test_rows_without_an_answer_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Any] = ["1", "", None, [], 0, 2.5]
    rows = [{"prompt": "1=", "answer": answer} for answer in answers]
    with caplog.at_level(logging.WARNING):
        found = prompts(write(tmp_path / "rows.jsonl", *rows))
    assert found.unlabelled == 3 and "3 of 6 rows" in caplog.text


REWARD = "def reward(response, label):\n    return float(label in response)\n"


def checked(tmp_path: Path, reward: str, *rows: Mapping[str, Any], **fields: Any) -> list[str | PolyremeError]:
    """What both services say of a run on these rows with a reward in Python."""
    (tmp_path / "reward.py").write_text(reward)
    model = tiny_model("tied", tmp_path / "model")
    for name, content in model_files().items():
        if name != "config.json":
            (model / name).write_bytes(content)
    data = DataConfig(train=write(tmp_path / "rows.jsonl", *rows), max_prompt_tokens=16, **fields)
    section = RewardConfig.model_validate({"rewards": [{"file": tmp_path / "reward.py"}]})
    config = run_config(tmp_path, model=ModelConfig(path=model), data=data, reward=section)
    return [each for check in (checks.check, reward_checks.check) for each in check(config)]


def about(found: list[str | PolyremeError], word: str) -> list[str]:
    return [str(each) for each in found if word in str(each)]


def test_a_misspelt_column_is_an_error_before_a_run(tmp_path: Path) -> None:
    found = checked(tmp_path, REWARD, {"prompt": "1=", "answer": "1"}, label_key="anwser")
    errors = [each for each in found if isinstance(each, DataError) and "anwser" in str(each)]
    assert len(errors) == 2 and all("columns are answer, prompt" in each.found for each in errors)


def test_the_default_column_is_an_error_for_a_reward_that_needs_it(tmp_path: Path) -> None:
    (error,) = about(checked(tmp_path, REWARD, {"prompt": "1=", "gold": "1"}), "columns are gold, prompt")
    assert "label=None" in error


def test_a_reward_that_can_do_without_an_answer_needs_no_column(tmp_path: Path) -> None:
    optional = REWARD.replace("label)", "label=None)", 1)
    assert not about(checked(tmp_path, optional, {"prompt": "1=", "gold": "1"}), "gold")


@pytest.mark.parametrize("reward", [REWARD, REWARD.replace("label)", "label=None)", 1)])
def test_some_rows_without_an_answer_are_a_notice_with_their_number(reward: str, tmp_path: Path) -> None:
    found = checked(tmp_path, reward, {"prompt": "1=", "answer": "1"}, {"prompt": "2="}, {"prompt": "3="})
    (notice,) = [each for each in found if "answer" in str(each)]
    assert isinstance(notice, str) and "1 of 3 rows have one" in notice
