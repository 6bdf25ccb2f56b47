"""Rows of the stages: trained tokens of conversations, omitted rows, and errors with file and line."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.config.stage import DpoConfig, PreferenceData, RewardModelConfig, SftData
from polyreme.errors import DataError
from polyreme_trainer.data.preferences import read_labelled, read_pairs, read_scored_pairs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.supervised import read_supervised
from polyreme_trainer.data.template import Template
from support.tiny_tokenizer import model_files

FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and not loop.last %}b{% else %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that formats earlier answers differently."""
NEWLINE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos> {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
"""A chat template that writes a blank after the end token, as ChatML writes a line break."""


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def template_of(data: Any, chat: str | None = None) -> Template:
    return Template(model_files() if chat is None else model_files(chat), data)


def trained(template: Template, rows: StageRows) -> list[str]:
    """The tokens that the loss counts, sequence by sequence."""
    return template.decode([ids[mask == 1].tolist() for ids, mask in zip(rows.ids, rows.loss_mask, strict=True)], special=True)


def texts(template: Template, rows: StageRows) -> list[str]:
    return template.decode([ids.tolist() for ids in rows.ids], special=True)


def sft(path: Path, **fields: Any) -> SftData:
    return SftData.model_validate({"train": path, **fields})


def reward_model(path: Path, **fields: Any) -> RewardModelConfig:
    data = {"train": path, "margin_key": "margin", "tie_key": "tie"}
    trainer = {"optimizer": {"lr": 1e-3}, "batch_size": 2}
    tree = {"stage": "reward-model", "model": {"path": path.parent}, "data": data, "trainer": trainer, **fields}
    return RewardModelConfig.model_validate(tree)


def test_every_answer_of_a_conversation_is_trained_on_and_the_last_of_a_prompt(tmp_path: Path) -> None:
    talk = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in talk]
    path = write(tmp_path, {"prompt": "3+3=", "response": "6"}, {"messages": messages}, {"prompt": messages[:3], "response": "4"})
    data = sft(path)
    template = template_of(data)
    rows = read_supervised(path, data, template)
    assert texts(template, rows)[1] == "<user>1+1=<assistant>2<eos><user>2+2=<assistant>4<eos>"
    assert trained(template, rows) == ["6<eos>", "2<eos>4<eos>", "4<eos>"]
    assert len(rows) == 3 and rows.width == 1


def test_what_follows_an_end_token_is_not_trained_on(tmp_path: Path) -> None:
    messages = [
        {"role": role, "content": c} for role, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    ]
    path = write(tmp_path, {"messages": messages})
    template = template_of(sft(path), NEWLINE)
    rows = read_supervised(path, sft(path), template)
    assert texts(template, rows) == ["<user>a<eos> <assistant>b<eos> <user>c<eos> <assistant>d<eos>"]
    assert trained(template, rows) == ["b<eos>d<eos>"]


def test_a_system_message_stands_before_messages(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    data = sft(path, system="s")
    template = template_of(data)
    assert texts(template, read_supervised(path, data, template)) == ["<system>s<user>a<assistant>b<eos>"]


@pytest.mark.parametrize(
    ("row", "chat"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": "a", "response": 3}, None),
        ({"messages": [{"role": "user", "content": "a"}]}, None),
        ({"messages": [{"role": "assistant", "content": "a"}]}, None),
        ({"messages": [{"role": r, "content": "a"} for r in ("user", "assistant", "user", "assistant")]}, FORGETFUL),
    ],
    ids=["no response", "no text", "no answer", "no question", "forgetful template"],
)
def test_a_supervised_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], chat: str | None) -> None:
    path = write(tmp_path, {"prompt": "1", "response": "2"}, row)
    with pytest.raises(DataError) as caught:
        read_supervised(path, sft(path), template_of(sft(path), chat))
    assert f"{path}:2" in caught.value.expected


def test_long_rows_are_counted_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1", "response": "2"}, {"prompt": "1", "response": "2" * 30})
    data = sft(path, max_tokens=10)
    template = template_of(data)
    rows = read_supervised(path, data, template)
    assert len(rows) == 1 and list(rows.left_out.values()) == [1]
    with pytest.raises(DataError) as caught:
        read_supervised(path, sft(path, max_tokens=10, overlong="error"), template)
    assert f"{path}:2" in caught.value.expected
    with pytest.raises(DataError):
        read_supervised(path, sft(path, max_tokens=2), template)


def test_a_pair_is_left_out_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1", "chosen": "2", "rejected": "3" * 30}, {"prompt": "4", "chosen": "5", "rejected": "6"})
    data = PreferenceData.model_validate({"train": path, "max_tokens": 10})
    template = template_of(data)
    rows = read_pairs(path, data, template)
    assert trained(template, rows) == ["5<eos>", "6<eos>"] and rows.width == 2 and len(rows) == 1


def test_answers_may_be_messages_with_or_without_the_prompt(tmp_path: Path) -> None:
    question = {"role": "user", "content": "1"}
    good, bad = ({"role": "assistant", "content": content} for content in "23")
    path = write(
        tmp_path,
        {"prompt": [question], "chosen": [good], "rejected": [bad]},
        {"chosen": [question, good], "rejected": [question, bad]},
        {"prompt": "1", "chosen": "2", "rejected": "3"},
    )
    data = PreferenceData.model_validate({"train": path})
    template = template_of(data)
    rows = read_pairs(path, data, template)
    assert texts(template, rows) == ["<user>1<assistant>2<eos>", "<user>1<assistant>3<eos>"] * 3


def test_whole_conversations_of_a_pair_share_their_prompt(tmp_path: Path) -> None:
    chosen, rejected = ([{"role": "user", "content": q}, {"role": "assistant", "content": "a"}] for q in "12")
    path = write(tmp_path, {"chosen": chosen, "rejected": rejected})
    data = PreferenceData.model_validate({"train": path})
    with pytest.raises(DataError) as caught:
        read_pairs(path, data, template_of(data))
    assert f"{path}:1" in caught.value.expected


def test_a_reward_model_reads_what_the_service_will_give_it(tmp_path: Path) -> None:
    """It reads everything that the template writes, also after the end token."""
    path = write(tmp_path, {"prompt": "1", "chosen": "2", "rejected": "3<eos>", "margin": 0.5, "tie": False})
    config = reward_model(path)
    template = template_of(config.data, NEWLINE)
    rows = read_scored_pairs(path, config, template)
    assert texts(template, rows) == ["<user>1<eos> <assistant>2<eos> ", "<user>1<eos> <assistant>3<eos> "]
    assert rows.columns["margin"].tolist() == [0.5] and rows.columns["tie"].tolist() == [0.0]


@pytest.mark.parametrize(("ties", "kept", "tie"), [("skip", 1, [0.0]), ("half", 3, [0.0, 1.0, 1.0])])
def test_ties_by_choice(tmp_path: Path, ties: str, kept: int, tie: list[float]) -> None:
    rows = [("2", "3", False), ("2", "3", True), ("2", "2", False)]
    path = write(tmp_path, *({"prompt": "1", "chosen": c, "rejected": r, "tie": t, "margin": 0} for c, r, t in rows))
    config = reward_model(path, ties=ties)
    found = read_scored_pairs(path, config, template_of(config.data))
    assert len(found) == kept and found.columns["tie"].tolist() == tie
    assert found.left_out == ({"ties": 2} if ties == "skip" else {})


@pytest.mark.parametrize("change", [{"margin": "much"}, {"tie": "no"}, {"margin": None}], ids=["text", "flag", "null"])
def test_a_number_of_a_pair_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write(tmp_path, {"prompt": "1", "chosen": "2", "rejected": "3", "tie": False, "margin": 1} | change)
    config = reward_model(path)
    with pytest.raises(DataError) as caught:
        read_scored_pairs(path, config, template_of(config.data))
    assert f"{path}:1" in caught.value.expected


def test_labelled_answers(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1", "response": "2", "label": True}, {"prompt": "1", "response": "3", "label": False})
    data = PreferenceData.model_validate({"train": path})
    template = template_of(data)
    rows = read_labelled(path, data, template)
    assert rows.columns["good"].tolist() == [1.0, 0.0] and trained(template, rows) == ["2<eos>", "3<eos>"]


def test_one_labelled_answer_has_no_other_answer_as_its_baseline(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1", "response": "2", "label": True})
    data = PreferenceData.model_validate({"train": path})
    with pytest.raises(DataError, match="two or more rows"):
        read_labelled(path, data, template_of(data))


def test_rows_are_taken_with_all_that_belongs_to_them() -> None:
    ids = [np.full(n, n, dtype=np.int32) for n in range(1, 7)]
    rows = StageRows(ids, [np.ones(len(each), np.uint8) for each in ids], 2, {"margin": np.array([0.1, 0.2, 0.3], np.float32)})
    taken = rows.take(np.array([2, 0]))
    assert [len(each) for each in taken.ids] == [5, 6, 1, 2]
    assert taken.columns["margin"].tolist() == pytest.approx([0.3, 0.1])
    assert len(taken) == 2


def test_kto_alone_has_no_pairs(tmp_path: Path) -> None:
    from polyreme_trainer.stages.table import TABLE

    path = write(tmp_path, {"prompt": "1", "response": "2", "label": True}, {"prompt": "1", "response": "3", "label": False})
    tree = {"stage": "dpo", "model": {"path": tmp_path}, "data": {"train": path}}
    tree |= {"trainer": {"optimizer": {"lr": 1e-3}, "batch_size": 2}, "loss": {"kind": "kto"}}
    config = DpoConfig.model_validate(tree)
    assert TABLE["dpo"].read(path, config, template_of(config.data), None).width == 1
    with pytest.raises(DataError):
        pairs = config.model_copy(update={"loss": DpoConfig.model_validate(tree | {"loss": {"kind": "orpo"}}).loss})
        TABLE["dpo"].read(path, pairs, template_of(config.data), None)


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            for number in range(count):
                file.write(json.dumps({"prompt": f"{number}+1=", "response": "7" * 200}) + "\n")
        data = sft(path, max_tokens=1000)
        template = template_of(data)
        tracemalloc.start()
        try:
            rows = read_supervised(path, data, template)
            assert len(rows) == count and len(rows.ids[count - 1]) > 200
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(4000) < 1.5 * peak(1000), "the rows of a chunk, and 8 bytes of each row"
