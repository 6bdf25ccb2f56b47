"""Rows of other systems in our columns."""

from typing import Any

import pytest

from polyreme.dataset.formats import FORMATS, advice, format_of, to_ours
from polyreme.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "verl",
        {"data_source": "s", "prompt": [ASKED], "reward_model": {"ground_truth": "4", "style": "rule"}, "ability": "math"},
        {"prompt": [ASKED], "answer": "4", "data_source": "s", "ability": "math"},
    ),
    ("paddlenlp", {"src": ["q"], "tgt": ["a"]}, {"prompt": "q", "answer": "a"}),
    ("paddlenlp", {"src": ["q", "q"], "tgt": ["a"]}, {"prompt": [ASKED, ANSWERED, ASKED]}),
    ("paddlenlp", {"src": ["q", "q"], "tgt": ["a", "a"]}, {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 1},
        {"messages": [ASKED, ANSWERED], "id": 1},
    ),
    (
        "sharegpt",
        {"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED]},
    ),
    (
        "sharegpt-pair",
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        {"prompt": [ASKED], "chosen": "a", "rejected": "b"},
    ),
    (
        "orca-pair",
        {"system": "s", "question": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [{"role": "system", "content": "s"}, ASKED], "chosen": "a", "rejected": "b"},
    ),
    (
        "orca-pair",
        {"system": "", "question": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ),
    ("trl-completion", {"prompt": "q", "completion": "a", "label": True}, {"prompt": "q", "response": "a", "label": True}),
    ("alpaca", {"instruction": "do", "input": "x", "output": "y"}, {"prompt": "do\nx", "response": "y"}),
    ("alpaca", {"instruction": "do", "output": "y"}, {"prompt": "do", "response": "y"}),
    (
        "alpaca",
        {"instruction": "q", "input": "", "output": "y", "system": "s", "history": [["q", "a"]]},
        {"prompt": [{"role": "system", "content": "s"}, ASKED, ANSWERED, ASKED], "response": "y"},
    ),
    ("alpaca", {"instruction": "q", "output": "y", "system": "", "history": []}, {"prompt": "q", "response": "y"}),
    (
        "alpaca-pair",
        {"instruction": "do", "input": "x", "chosen": "a", "rejected": "b"},
        {"prompt": "do\nx", "chosen": "a", "rejected": "b"},
    ),
    ("openrlhf", {"input": "q", "label": 4}, {"prompt": "q", "answer": 4}),
    ("openrlhf-sft", {"input": "q", "output": "a"}, {"prompt": "q", "response": "a"}),
    ("mindspeed", {"problem": "q", "answer": "4", "level": 2}, {"prompt": "q", "answer": "4", "level": 2}),
    ("trl-completion", {"prompt": [ASKED], "completion": [ANSWERED]}, {"prompt": [ASKED], "response": "a"}),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}),
    (
        "trl-pair",
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED, "content": "b"}]},
        {"prompt": [ASKED], "chosen": "a", "rejected": "b"},
    ),
    (
        "hh-rlhf",
        {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"},
        {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " a", "rejected": " b"},
    ),
    ("gsm8k", {"question": "q", "answer": "one\n#### 4"}, {"prompt": "q", "answer": "4", "solution": "one\n#### 4"}),
    ("ours", {"prompt": "q", "answer": 4, "source": "s"}, {"prompt": "q", "answer": 4, "source": "s"}),
]


@pytest.mark.parametrize(("name", "row", "ours"), ROWS)
def test_a_row_is_recognised_and_keeps_its_other_columns(name: str, row: dict[str, Any], ours: dict[str, Any]) -> None:
    kind = format_of(row)
    assert kind.name == name
    assert to_ours(row, kind, "here") == ours


def test_every_format_is_tested() -> None:
    assert {name for name, *_ in ROWS} == {each.name for each in FORMATS}


def test_a_row_of_another_format_is_named() -> None:
    kinds = {each.name: each for each in FORMATS}
    differing = {"chosen": [ASKED, ANSWERED], "rejected": [ANSWERED, ANSWERED]}
    no_prompt = {"chosen": "x", "rejected": "y"}
    for name, row in (
        ("verl", {"prompt": "q"}),
        ("paddlenlp", {"src": ["q"], "tgt": ["a", "a"]}),
        ("paddlenlp", {"src": ["q", "q", "q"], "tgt": ["a"]}),
        ("trl-pair", differing),
        ("hh-rlhf", no_prompt),
        ("hh-rlhf", {"chosen": "x", "rejected": 1}),
    ):
        with pytest.raises(DataError, match=rf"{name} in rows:3"):
            to_ours(row, kinds[name], "rows:3")


@pytest.mark.parametrize(
    ("row", "column", "helps"),
    [
        ({"question": "q", "chosen": "a", "rejected": "b"}, "prompt", True),
        ({"conversations": [{"from": "human", "value": "q"}]}, "prompt", True),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, "prompt", True),
        ({"prompt": "q", "completion": "a", "label": True}, "response", True),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "response", False),
        ({"text": "q"}, "prompt", False),
        ({"chosen": "x", "rejected": "y"}, "prompt", False),
    ],
)
def test_a_missing_column_is_advised_on_when_a_conversion_writes_it(row: dict[str, Any], column: str, helps: bool) -> None:
    for where in ("a b/rows.jsonl:12", "a b/rows.jsonl row 12", "a b/rows.jsonl element 12"):
        text = advice(row, column, where)
        assert ("`polyreme data convert 'a b/rows.jsonl' TARGET.jsonl`" in text) == helps == bool(text)
