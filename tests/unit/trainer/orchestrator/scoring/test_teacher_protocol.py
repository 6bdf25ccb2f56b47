"""Requests to a teacher, and valid replies with log-probabilities."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.scoring.teacher_protocol import (
    TeacherProtocol,
    TeacherReplyError,
    differing,
    model_of,
    parse,
    request,
)

IDS = [5, 6, 5]


def vllm(*rows: Any) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": [None, *rows]}]}


def row(each: int, logprob: Any, text: str = "t") -> dict[str, Any]:
    return {str(each): {"logprob": logprob, "rank": 1, "decoded_token": text}}


def echo(numbers: list[Any], texts: list[str] | None = None) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"token_logprobs": numbers, "tokens": texts or ["t"] * len(numbers)}}]}


def test_ids_are_sent_and_one_token_is_generated() -> None:
    assert request(IDS, "prompt_logprobs") == {"prompt": IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    assert request(IDS, "echo") == {"prompt": IDS, "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}


@given(st.lists(st.floats(-100, 0, width=32), min_size=2, max_size=2))
def test_every_token_but_the_first_has_its_number(numbers: list[float]) -> None:
    others = row(9, -0.1)  # vLLM adds more likely ids if more are requested
    replies: list[tuple[TeacherProtocol, Any]] = [
        ("prompt_logprobs", vllm({**others, **row(6, numbers[0], "a")}, row(5, numbers[1], "b"))),
        ("echo", echo([None, *numbers], ["", "a", "b"])),
        ("echo", echo([None, *numbers, -3.0], ["", "a", "b", "generated"])),
    ]
    for protocol, reply in replies:
        found = parse(reply, IDS, protocol)
        assert (found.logprobs.tolist(), found.texts) == (numbers, ["a", "b"])


@pytest.mark.parametrize(
    ("protocol", "reply"),
    [
        ("prompt_logprobs", {"choices": []}),
        ("prompt_logprobs", []),
        ("prompt_logprobs", {"choices": [{"text": "x"}]}),
        ("prompt_logprobs", echo([None, -1.0, -1.0])),
        ("prompt_logprobs", vllm(row(6, -1.0))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, -1.0), row(5, -1.0))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(6, -1.0))),
        ("prompt_logprobs", vllm(row(6, -1.0), None)),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, None))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, "x"))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, "-1.0"))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, False))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, [-1.0]))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, -(10**400)))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, math.nan))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, -math.inf))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, -9999.0))),
        ("prompt_logprobs", vllm(row(6, -1.0), row(5, 2.5))),
        ("echo", vllm(row(6, -1.0), row(5, -1.0))),
        ("echo", echo([None, -1.0])),
        ("echo", echo([None, -1.0, -1.0, -1.0, -1.0])),
        ("echo", echo([None, -1.0, None])),
        ("echo", echo([None, -1.0, "-1.0"])),
    ],
)
def test_anything_else_is_refused_and_never_a_number(protocol: TeacherProtocol, reply: Any) -> None:
    with pytest.raises(TeacherReplyError, match=r"expected .* found"):
        parse(reply, IDS, protocol)


def test_the_model_is_the_named_one_or_the_only_one() -> None:
    listed = {"data": [{"id": "a", "max_model_len": 64}, {"id": "b"}]}
    assert (model_of(listed, "a"), model_of(listed, "b")) == (("a", 64), ("b", None))
    assert model_of({"data": [{"id": "a"}]}, None) == ("a", None)
    for tree, name in ((listed, None), (listed, "c"), ({}, None), ([], "a"), ({"data": [1]}, "a")):
        with pytest.raises(TeacherReplyError):
            model_of(tree, name)


def test_vocabularies_are_compared_by_the_texts_of_ids() -> None:
    own = ["a", " the", "\ufffd", "<eos>", "b"]
    assert differing(range(5), own, ["a", "\u2581the", "\ufffd", "<eos>", "b"]) is None
    assert differing(range(5), own, ["a", "the", "x", "", "b"]) is None
    assert differing(range(5), own, ["a", " they", "", "<eos>", "b"]) == (1, "the", "they")
    with pytest.raises(TeacherReplyError):
        differing(range(5), own, [""] * 5)
