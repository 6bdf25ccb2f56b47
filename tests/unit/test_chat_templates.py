"""A conversation has the same tokens wherever it meets a chat template: prompts, stages, warm start, checks of data, and /v1."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from polyreme.config.data import DataConfig
from polyreme.config.stage import PreferenceData, RewardModelConfig, RewardModelData, SftData
from polyreme.dataset.chat import clock_of, read_chat
from polyreme.errors import ConfigError, DataError
from polyreme_rollout.engine.plain_openai import TokenizerCodec
from polyreme_rollout.http.http_app import rewritten
from polyreme_trainer.data.preferences import read_labelled, read_pairs, read_scored_pairs
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.supervised import load_examples, read_supervised
from polyreme_trainer.data.template import Template
from support.chat_templates import ASKED, CASES, DAY, STOPS, TEMPLATES, TOOL, chat_model_files
from support.stages import stage_config

WHERE = [(style, case) for style in TEMPLATES for case in CASES]


@pytest.fixture
def tokenizers(tmp_path: Path) -> dict[str, Any]:
    found = {}
    for style in TEMPLATES:
        folder = tmp_path / style
        folder.mkdir()
        for name, content in chat_model_files(style).items():
            (folder / name).write_bytes(content)
        found[style] = PreTrainedTokenizerFast.from_pretrained(folder)
    return found


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, opened: bool) -> list[int]:
    """What transformers alone makes of messages in the form of its own documentation."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=opened, strftime_now=clock_of(DAY)
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def refuses(style: str, case: str) -> bool:
    return style == "strict" and case in ("system", "tools", "tools as text", "functions", "calls", "calls as text", "thought")


@pytest.mark.parametrize(("style", "case"), WHERE)
def test_one_conversation_has_the_same_tokens_everywhere(
    style: str, case: str, tokenizers: dict[str, Any], tmp_path: Path
) -> None:
    messages, tools, given, given_tools = CASES[case]
    answer = [{"role": "assistant", "content": "3"}]
    row = {"prompt": messages, "tools": tools, "response": "3", "chosen": answer, "rejected": "4", "label": True, "answer": "3"}
    told = {"messages": [*messages, *answer], "tools": tools}
    rows, turns = tmp_path / "rows.jsonl", tmp_path / "turns.jsonl"
    rows.write_text(json.dumps(row))
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    turns.write_text(json.dumps(told))
    limits: dict[str, Any] = {"train": rows, "max_tokens": 4000, "date": DAY}
    data, files = DataConfig(train=rows, max_prompt_tokens=4000, date=DAY), chat_model_files(style)
    template = Template(files, data)
    if refuses(style, case):
        for path in (rows, turns):
            with pytest.raises(DataError, match=rf"{path.name}:1"):
                list(load_examples(path, data, template, 4000))
        with pytest.raises(DataError, match=r"rows\.jsonl:1"):
            load_prompts(rows, data, template)
        return
    tokenizer = tokenizers[style]
    prompt = rendered(tokenizer, given, given_tools, opened=True)
    end = tokenizer.convert_tokens_to_ids(STOPS[style])

    def conversation(text: str) -> list[int]:
        ids = rendered(tokenizer, [*given, {"role": "assistant", "content": text}], given_tools, opened=False)
        return ids[: len(ids) - ids[::-1].index(end)]

    whole = conversation("3")
    assert load_prompts(rows, data, template).prompts[0].ids.tolist() == prompt
    (warm,) = load_examples(rows, data, template, 4000)
    assert warm.ids.tolist() == whole and whole[: len(prompt)] == prompt
    assert np.flatnonzero(warm.loss_mask).tolist() == list(range(len(prompt), len(whole)))
    assert read_supervised(rows, SftData(**limits), template).ids[0].tolist() == whole
    if not any(message["role"] == "assistant" for message in given):  # then an earlier answer may be written differently
        for read in (
            lambda: next(load_examples(turns, data, template, 4000)).ids,
            lambda: read_supervised(turns, SftData(**limits), template).ids[0],
        ):
            assert read().tolist() == whole
    pair = read_pairs(rows, PreferenceData(**limits), template)
    assert [ids.tolist() for ids in pair.ids] == [whole, conversation("4")]
    assert read_labelled(tmp_path / "two.jsonl", PreferenceData(**limits), template).ids[0].tolist() == whole
    stage = stage_config(tmp_path, "reward-model")
    assert isinstance(stage, RewardModelConfig)
    scored = read_scored_pairs(rows, stage.model_copy(update={"data": RewardModelData(**limits)}), template)
    assert scored.ids[0].tolist() == rendered(tokenizer, [*given, *answer], given_tools, opened=False)
    asked = rewritten(json.dumps({"messages": messages, "tools": tools}).encode())
    assert vllm_ids(tokenizer, json.loads(asked)) == prompt
    assert plain_ids(tokenizer, json.loads(asked)) == prompt


def vllm_ids(tokenizer: Any, asked: dict[str, Any]) -> list[int]:
    """What vLLM's application makes of a request: arguments of calls are read from text, and options replace its own variables."""
    for message in asked["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"] = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
    return rendered(tokenizer, asked["messages"], asked.get("chat_template_kwargs", {}).get("tools"), opened=True)


def plain_ids(tokenizer: Any, asked: dict[str, Any]) -> list[int]:
    """What the application of the other engines makes of a request."""
    codec = TokenizerCodec(tokenizer, (), DAY)
    return codec.chat(read_chat(asked["messages"], "messages", asked.get("tools")))


@pytest.mark.parametrize("style", ["chatml", "thinking", "headers"])
def test_rows_of_parquet_have_the_tokens_of_json_lines(style: str, tmp_path: Path) -> None:
    """Arrow fills what a row does not have with null: here the calls, names and thoughts of every message, and fields of a tool."""
    rows = [{"prompt": CASES[case][2], "tools": CASES[case][3]} for case in CASES]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pa.Table.from_pylist(json.loads(json.dumps(rows))), tmp_path / "rows.parquet")
    data = DataConfig(train=lines, max_prompt_tokens=4000, date=DAY)
    template = Template(chat_model_files(style), data)
    one, other = (load_prompts(path, data, template).prompts for path in (lines, tmp_path / "rows.parquet"))
    assert [prompt.text for prompt in one] == [prompt.text for prompt in other] and len(one) == len(CASES)


def test_rows_with_different_tools_are_rendered_together(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "subtract"}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "q", "tools": tools}) for tools in ([TOOL], None, [other], [TOOL, other])))
    data = DataConfig(train=path, max_prompt_tokens=4000)
    texts = [prompt.text for prompt in load_prompts(path, data, Template(chat_model_files("chatml"), data)).prompts]
    assert [("add" in text, "subtract" in text) for text in texts] == [(True, False), (False, False), (False, True), (True, True)]


def test_tools_that_a_template_leaves_out_are_an_error_unless_no_column_has_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "tools": [TOOL]}))
    data = DataConfig(train=path, max_prompt_tokens=4000)
    with pytest.raises(DataError, match=r"shows tools in .*rows\.jsonl:1.*data\.tools_key"):
        load_prompts(path, data, Template(chat_model_files("strict"), data))
    without = data.model_copy(update={"tools_key": None})
    assert load_prompts(path, without, Template(chat_model_files("strict"), without)).prompts[0].text == "[INST]q[/INST]"
    plain = data.model_copy(update={"template": "none"})
    assert load_prompts(path, plain, Template(chat_model_files("strict"), plain)).prompts[0].text == "q"


def test_a_developer_is_the_system_of_a_template_that_knows_none_and_other_roles_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "developer", "content": "Be brief."}, ASKED]}))
    data = DataConfig(train=path, max_prompt_tokens=4000, system="unused")
    (prompt,) = load_prompts(path, data, Template(chat_model_files("chatml"), data)).prompts
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    path.write_text(json.dumps({"prompt": [{"role": "users", "content": "x"}]}))
    with pytest.raises(DataError, match=r"message 1 in .*rows\.jsonl:1; found 'users'"):
        load_prompts(path, data, Template(chat_model_files("chatml"), data))
    own = {**chat_model_files("chatml"), "chat_template.jinja": TEMPLATES["chatml"].replace("'tool'", "'users'").encode()}
    assert "<tool_response>x" in load_prompts(path, data, Template(own, data)).prompts[0].text


def test_the_day_of_a_template_is_that_of_the_configuration(tmp_path: Path) -> None:
    files = chat_model_files("headers")
    one, other, today = (Template(files, DataConfig(train=tmp_path, date=day)) for day in (DAY, date(2026, 1, 3), None))
    assert "Today: 02 Jan 2026" in one.render(["q"])[0] and "Today: 03 Jan 2026" in other.render(["q"])[0]
    assert one.digest != other.digest and one.render(["q"]) != today.render(["q"])
    plain = [Template(chat_model_files("chatml"), DataConfig(train=tmp_path, date=day)) for day in (DAY, None)]
    assert plain[0].digest == plain[1].digest


def test_a_template_without_a_system_message_refuses_that_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"after data\.system.*System role not supported"):
        Template(chat_model_files("strict"), DataConfig(train=tmp_path, system="Be brief."))
