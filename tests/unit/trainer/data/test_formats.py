"""Rows in the formats of other systems become prompts and examples without a conversion."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.dataset.test_megatron_files import write_megatron

from polyreme.config.data import DataConfig, DataSource, WeightedSource
from polyreme.config.stage import PreferenceData, SftData
from polyreme.errors import DataError
from polyreme_trainer.data.preferences import read_pairs
from polyreme_trainer.data.prompt_store import Prompt, PromptStore
from polyreme_trainer.data.prompts import Dataset, load_prompts
from polyreme_trainer.data.supervised import read_supervised
from polyreme_trainer.data.template import Template
from support.tiny_tokenizer import model_files

VERL = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}


def prompts(path: Any, *rows: dict[str, Any], **keys: Any) -> Dataset:
    """The prompts of `rows` in a file at `path`; of the data `path` itself without rows."""
    if rows:
        path.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(train=path, **keys)
    return load_prompts(data.train, data, Template(model_files(), data))


def test_verl(tmp_path: Path) -> None:
    (prompt,) = prompts(tmp_path / "rows.jsonl", VERL, label_key="reward_model.ground_truth").prompts
    assert (prompt.text, prompt.label, prompt.plain) == ("<user>1+1=<assistant>", "2", "1+1=")
    assert json.loads(prompt.metadata_json)["data_source"] == "sums"


def test_paddlenlps_history_and_label(tmp_path: Path) -> None:
    rows = [{"src": ["1=", "2="], "tgt": ["a"]}, {"src": ["3="], "tgt": ["b"]}, {"src": ["4="], "tgt": []}]
    history, labelled, bare = prompts(tmp_path / "rows.jsonl", *rows, prompt_key="src", label_key="tgt").prompts
    assert (history.text, history.label) == ("<user>1=<assistant>a<eos><user>2=<assistant>", "")
    assert (labelled.text, labelled.label) == ("<user>3=<assistant>", "b")
    assert (bare.text, bare.label) == ("<user>4=<assistant>", "")


def test_openrlhf_and_sharegpt(tmp_path: Path) -> None:
    (prompt,) = prompts(tmp_path / "a.jsonl", {"input": "1=", "label": 3}, prompt_key="input", label_key="label").prompts
    assert (prompt.text, prompt.label) == ("<user>1=<assistant>", "3")
    turns = [{"from": "system", "value": "a"}, {"from": "human", "value": "1="}, {"from": "gpt", "value": "2"}]
    (prompt,) = prompts(tmp_path / "b.jsonl", {"conversations": turns[:2]}, prompt_key="conversations").prompts
    assert prompt.text == "<system>a<user>1=<assistant>" and prompt.plain == "1="
    data = SftData(train=tmp_path / "c.jsonl", messages_key="conversations")
    (tmp_path / "c.jsonl").write_text(json.dumps({"conversations": turns}))
    template = Template(model_files(), data)
    rows = read_supervised(data.train, data, template)
    assert template.decode([rows.ids[0].tolist()], special=True) == ["<system>a<user>1=<assistant>2<eos>"]


def test_trl_and_deepspeed_chat(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    asked = {"role": "user", "content": "1="}
    answers = {name: [asked, {"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "3"))}
    path.write_text("\n".join(map(json.dumps, [answers, {"prompt": "1=", "chosen": "2", "rejected": "3"}])))
    data = PreferenceData(train=path)
    template = Template(model_files(), data)
    rows = read_pairs(path, data, template)
    expected = ["<user>1=<assistant>2<eos>", "<user>1=<assistant>3<eos>"]
    assert template.decode([ids.tolist() for ids in rows.ids], special=True) == expected * 2
    path.write_text(json.dumps({"prompt": [asked], "completion": [{"role": "assistant", "content": "2"}]}))
    supervised = SftData(train=path, response_key="completion")
    (ids,) = read_supervised(path, supervised, template).ids
    assert template.decode([ids.tolist()], special=True) == expected[:1]


def test_mindspeeds_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    template = Template(model_files(), DataConfig(train=tmp_path))
    asked, right = template.encode(["<user>1+1=<assistant>", "2"])
    for key, ids in {"input_ids": asked, "attention_mask": np.ones_like(asked), "labels": right}.items():
        write_megatron(tmp_path / f"sums_packed_{key}_document", [ids.tolist()])
    (prompt,) = prompts(tmp_path / "sums", prompt_key="input_ids", label_key="labels").prompts
    assert prompt.ids.tolist() == asked.tolist() and (prompt.text, prompt.label) == ("<user>1+1=<assistant>", "2")
    assert json.loads(prompt.metadata_json) == {}
    write_megatron(tmp_path / "alien", [[99_999]])
    with pytest.raises(DataError, match=r"99999.*"):
        prompts(tmp_path / "alien.idx", prompt_key="input_ids")


def test_sources_are_numbered_one_after_the_other(tmp_path: Path) -> None:
    for name, texts in {"a": ["1=", "2=", "1="], "b": ["3=", "2="]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    sources = (tmp_path / "a.jsonl", WeightedSource(path=tmp_path / "b.jsonl", add={"answer": 7}))
    dataset = prompts(sources)
    assert [(prompt.plain, prompt.label) for prompt in dataset.prompts] == [
        ("1=", ""), ("2=", ""), ("1=", ""), ("3=", "7"), ("2=", "7"),
    ]  # fmt: skip
    assert dataset.sizes == (3, 2)
    single = prompts(sources, deduplicate=True)
    assert [prompt.plain for prompt in single.prompts] == ["1=", "2=", "3="]
    assert (single.duplicates, single.sizes) == (2, (2, 1))
    with pytest.raises(DataError, match=r"a\.jsonl .* found 4 repeated"):
        prompts((tmp_path / "a.jsonl", tmp_path / "a.jsonl"), deduplicate=True)


def test_weights_are_for_all_sources_or_for_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weight"):
        DataConfig(train=(tmp_path, WeightedSource(path=tmp_path, weight=1)))
    with pytest.raises(ValueError, match="split"):
        DataSource(path=tmp_path, split=(0.5, 0.5))
    with pytest.raises(ValueError, match="at least one"):
        DataConfig(train=())


@pytest.mark.parametrize("in_memory", [1, 1 << 20])
def test_a_store_returns_its_prompts_from_memory_and_from_disk(in_memory: int) -> None:
    store = PromptStore(in_memory)
    added = [Prompt(np.arange(n, dtype=np.int32), f"t{n}ü\n", str(n), json.dumps({"n": n}), "p") for n in range(1500)]
    for prompt in added:
        store.append(prompt)
    assert len(store) == 1500 and store[-1].label == "1499"
    for place in (0, 1, 1023, 1024, 1499):
        assert store[place].ids.tolist() == added[place].ids.tolist() and store[place].text == added[place].text
    assert [prompt.label for prompt in store[3:6]] == ["3", "4", "5"]
    assert [prompt.metadata_json for prompt in store] == [prompt.metadata_json for prompt in added]
    with pytest.raises(IndexError):
        store[1500]
