"""Preference rows of public data sets: read as they are, or refused with the command that converts them."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from polyreme.config.data import DataConfig
from polyreme.config.stage import PreferenceData, RewardModelConfig, RewardModelData, SftData
from polyreme.errors import DataError
from polyreme_trainer.data.preferences import read_labelled, read_pairs, read_scored_pairs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.supervised import read_supervised
from polyreme_trainer.data.template import Template
from polyreme_trainer.data_command import convert
from support.stages import stage_config
from support.tiny_tokenizer import model_files

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in (("user", "1+1="), ("assistant", "2"), ("assistant", "3")))
PAIR = ["<user>1+1=<assistant>2<eos>", "<user>1+1=<assistant>3<eos>"]
ULTRAFEEDBACK = {
    "prompt": "1+1=",
    "prompt_id": "x",
    "chosen": [USER, GOOD],
    "rejected": [USER, BAD],
    "messages": [USER, GOOD],
    "score_chosen": 8.5,
    "score_rejected": 2.0,
}


def pairs(path: Path) -> list[str]:
    """The pairs of dpo; those of a reward model must be the same."""
    data = PreferenceData(train=path)
    template = Template(model_files(), data)
    found = texts(template, read_pairs(path, data, template))
    stage = stage_config(path.parent, "reward-model")
    assert isinstance(stage, RewardModelConfig)
    stage = stage.model_copy(update={"data": RewardModelData(train=path)})
    assert texts(template, read_scored_pairs(path, stage, template)) == found
    return found


def texts(template: Template, rows: StageRows) -> list[str]:
    return template.decode([ids.tolist() for ids in rows.ids], special=True)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


ACCEPTED: dict[str, dict[str, Any]] = {
    "ultrafeedback": ULTRAFEEDBACK,
    "whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "whole conversations and their prompt": {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "answers": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "a message each": {"prompt": "1+1=", "chosen": GOOD, "rejected": BAD},
    "texts": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "sharegpt's messages": {
        "chosen": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}],
        "rejected": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "3"}],
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_pair_of_a_public_form_is_read(name: str, tmp_path: Path) -> None:
    assert pairs(write(tmp_path / "rows.jsonl", ACCEPTED[name])) == PAIR
    parquet.write_table(pa.Table.from_pylist([ACCEPTED[name]]), tmp_path / "rows.parquet")
    assert pairs(tmp_path / "rows.parquet") == PAIR


def test_several_turns_before_the_answers(tmp_path: Path) -> None:
    before = [{"role": "system", "content": "x"}, USER, GOOD, {"role": "user", "content": "2+2="}]
    row = {**ULTRAFEEDBACK, "prompt": "2+2=", "chosen": [*before, GOOD], "rejected": [*before, BAD]}
    assert pairs(write(tmp_path / "rows.jsonl", row))[0] == "<system>x<user>1+1=<assistant>2<eos><user>2+2=<assistant>2<eos>"


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "9+9="},
        {"prompt": [{"role": "user", "content": "9+9="}]},
        {"rejected": [{"role": "user", "content": "9+9="}, BAD]},
        {"rejected": [BAD]},
        {"chosen": [USER, USER]},
        {"chosen": []},
        {"chosen": None},
    ],
)
def test_a_pair_that_does_not_fit_is_named(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        pairs(write(tmp_path / "rows.jsonl", ULTRAFEEDBACK, {**ULTRAFEEDBACK, **change}))


CONVERTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hh": (
        {"chosen": "\n\nHuman: 1\n\nAssistant: 2", "rejected": "\n\nHuman: 1\n\nAssistant: 3"},
        [f"<user>{'<unk>' * 3}uman<unk> 1{'<unk>' * 3}ssistant<unk><assistant> {answer}<eos>" for answer in "23"],
    ),
    "orca": ({"system": "x", "question": "1+1=", "chosen": "2", "rejected": "3"}, [f"<system>x{text}" for text in PAIR]),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "1+1="}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        PAIR,
    ),
    "alpaca": ({"instruction": "1+1=", "input": "", "chosen": "2", "rejected": "3"}, PAIR),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_pair_of_another_form_names_the_command_that_converts_it(name: str, tmp_path: Path) -> None:
    row, read = CONVERTED[name]
    path, target = write(tmp_path / "rows.jsonl", row), tmp_path / "target.jsonl"
    with pytest.raises(DataError) as caught:
        pairs(path)
    assert f"`polyreme data convert {path} TARGET.jsonl`" in caught.value.do
    convert(path, target)
    assert pairs(target) == read


def test_labelled_answers_of_trl(tmp_path: Path) -> None:
    rows = [{"prompt": [USER], "completion": [GOOD], "label": True}, {"prompt": "1+1=", "completion": "3", "label": False}]
    path, target, data = write(tmp_path / "rows.jsonl", *rows), tmp_path / "target.jsonl", PreferenceData(train=tmp_path)
    template = Template(model_files(), data)
    with pytest.raises(DataError, match="polyreme data convert"):
        read_labelled(path, data, template)
    convert(path, target)
    found = read_labelled(target, data, template)
    assert texts(template, found) == PAIR and found.columns["good"].tolist() == [1.0, 0.0]
    assert texts(template, read_labelled(path, data.model_copy(update={"response_key": "completion"}), template)) == PAIR


def test_an_answer_of_kto_may_be_the_json_text_of_its_message(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": json.dumps([answer]), "label": answer == GOOD} for answer in (GOOD, BAD)]
    path = write(tmp_path / "rows.jsonl", *rows)
    data = PreferenceData(train=path)
    template = Template(model_files(), data)
    assert texts(template, read_labelled(path, data, template)) == PAIR


def test_conversations_of_sharegpt_are_supervised_rows_after_the_conversion(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"conversations": [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]})
    data = SftData(train=path)
    template = Template(model_files(), DataConfig(train=path))
    with pytest.raises(DataError, match="polyreme data convert"):
        read_supervised(path, data, template)
    convert(path, tmp_path / "target.jsonl")
    assert texts(template, read_supervised(tmp_path / "target.jsonl", data, template)) == PAIR[:1]
    named = data.model_copy(update={"messages_key": "conversations"})
    assert texts(template, read_supervised(path, named, template)) == PAIR[:1]
    assert texts(template, read_supervised(write(path, ULTRAFEEDBACK), data, template)) == PAIR[:1]
