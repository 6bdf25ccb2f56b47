"""Foreign servers' replies and the choice of the next endpoint, without a network."""

import json
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_reward.items import Item, Status
from polyreme_reward.remote.endpoints import RewardEndpoints
from polyreme_reward.remote.protocols import PROTOCOLS, BadReply, parse
from polyreme_reward.remote.reward import HttpReward

ITEMS = [Item("k", "p", "r", "r<eos>", "l", '{"a": 1}', "<user>p"), Item("", "q", "s", "", "m")]


def test_requests_carry_what_each_protocol_names() -> None:
    assert PROTOCOLS["paddlenlp"].encode(ITEMS) == {"src": ["<user>p", "q"], "tgt": ["l", "m"], "response": ["r<eos>", "s"]}
    assert PROTOCOLS["openrlhf"].encode(ITEMS) == {
        "query": ["<user>pr<eos>", "qs"],
        "prompts": ["<user>p", "q"],
        "labels": ["l", "m"],
    }
    assert PROTOCOLS["native"].encode(ITEMS)["items"][0] == {
        "key": "k",
        "prompt": "p",
        "templated_prompt": "<user>p",
        "response": "r",
        "response_raw": "r<eos>",
        "label": "l",
        "metadata": {"a": 1},
    }


def test_a_missing_label_is_null_in_every_protocol() -> None:
    items = [Item("", "p", "r"), Item("", "p", "r", label="l")]
    assert PROTOCOLS["paddlenlp"].encode(items)["tgt"] == [None, "l"]
    assert PROTOCOLS["openrlhf"].encode(items)["labels"] == [None, "l"]
    assert [item["label"] for item in PROTOCOLS["native"].encode(items)["items"]] == [None, "l"]


async def test_a_number_that_json_does_not_have_is_an_error_and_never_sent() -> None:
    reward = HttpReward("far", 1.0, ["http://127.0.0.1:9/"], "native", 5.0, {"tries": 1})
    try:
        (outcome,) = await reward.score([Item("", "p", "r", metadata_json='{"level": NaN}')])
    finally:
        await reward.close()
    assert outcome.status is Status.ERROR and "values of JSON" in outcome.message


@pytest.mark.parametrize(
    ("protocol", "tree"),
    [
        ("paddlenlp", {"error_code": 0, "error_msg": "Success", "score": [1, 0.5]}),
        ("openrlhf", {"rewards": [1, 0.5]}),
        ("openrlhf", {"rewards": [1, 0.5], "scores": [1, 0], "extra_logs": {"a": [1, 2]}}),
        ("native", {"results": [{"status": "ok", "score": 1, "parts": []}, {"status": "ok", "score": 0.5}]}),
        ("native", {"results": [{"status": "ok", "score": 1, "parts": [{"name": []}]}, {"status": "ok", "score": 0.5}]}),
    ],
)
def test_good_replies(protocol: str, tree: dict[str, Any]) -> None:
    outcomes = parse(200, json.dumps(tree).encode(), PROTOCOLS[protocol], ITEMS)
    assert [(o.status, o.value) for o in outcomes] == [(Status.OK, 1.0), (Status.OK, 0.5)]


@pytest.mark.parametrize(
    ("protocol", "status", "body", "again"),
    [
        ("paddlenlp", 200, b'{"error_code": 500, "error_msg": "boom", "score": [0, 0]}', False),
        ("paddlenlp", 200, b'{"score": [1, 1]}', False),
        ("paddlenlp", 200, b'{"error_code": 0, "score": [1]}', False),
        ("paddlenlp", 200, b'{"error_code": 0, "score": null}', False),
        ("paddlenlp", 200, b'{"error_code": 0, "score": 1}', False),
        ("paddlenlp", 422, b'{"detail": []}', False),
        ("paddlenlp", 500, b"", True),
        ("paddlenlp", 503, b"", True),
        ("paddlenlp", 429, b"", True),
        ("paddlenlp", 204, b"", False),
        ("paddlenlp", 200, b"<html>", False),
        ("paddlenlp", 200, b"[" * 100_000, False),
        ("paddlenlp", 200, b"[1, 1]", False),
        ("openrlhf", 200, b'{"scores": [1, 1]}', False),
        ("openrlhf", 200, b'{"rewards": [1, 1, 1]}', False),
        ("native", 200, b'{"results": [{"status": "ok", "score": 1}]}', False),
    ],
)
def test_replies_that_score_nothing(protocol: str, status: int, body: bytes, again: bool) -> None:
    with pytest.raises(BadReply) as caught:
        parse(status, body, PROTOCOLS[protocol], ITEMS)
    assert caught.value.again is again
    assert caught.value.status in (Status.ERROR, Status.INVALID)


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("paddlenlp", b'{"error_code": 0, "score": [1, NaN]}'),
        ("paddlenlp", b'{"error_code": 0, "score": [1, null]}'),
        ("paddlenlp", b'{"error_code": 0, "score": [1, "1"]}'),
        ("paddlenlp", b'{"error_code": 0, "score": [1, 1e999]}'),
        ("openrlhf", b'{"rewards": [1, Infinity]}'),
        ("native", b'{"results": [{"status": "ok", "score": 1}, {"status": "ok", "score": null}]}'),
        ("native", b'{"results": [{"status": "ok", "score": 1}, {"status": "great", "score": 1}]}'),
        ("native", b'{"results": [{"status": "ok", "score": 1}, 1]}'),
    ],
)
def test_one_bad_value_leaves_the_others(protocol: str, body: bytes) -> None:
    good, bad = parse(200, body, PROTOCOLS[protocol], ITEMS)
    assert (good.status, good.value) == (Status.OK, 1.0)
    assert bad.status is Status.INVALID


TOKENS = ITEMS[0]._replace(token_ids=(5, 6), token_texts=("r", "<eos>"))


def test_the_native_wire_carries_tokens_and_a_number_for_each() -> None:
    sent = PROTOCOLS["native"].encode([TOKENS, ITEMS[1]])["items"]
    assert (sent[0]["token_ids"], sent[0]["token_texts"]) == ([5, 6], ["r", "<eos>"])
    assert not {"token_ids", "token_texts"} & sent[1].keys()
    results = [{"status": "ok", "token_rewards": [1, 0.5]}, {"status": "ok", "score": 2, "token_rewards": None}]
    summed, plain = parse(200, json.dumps({"results": results}).encode(), PROTOCOLS["native"], [TOKENS, ITEMS[1]])
    assert (summed.value, summed.token_rewards) == (1.5, (1.0, 0.5))
    assert (plain.value, plain.token_rewards) == (2.0, ())


@pytest.mark.parametrize(
    ("protocol", "tree"),
    [
        ("paddlenlp", {"error_code": 0, "score": [[1, 0.5]]}),
        ("openrlhf", {"rewards": [[1, 0.5]]}),
        ("native", {"results": [{"status": "ok", "token_rewards": [1]}]}),
    ],
)
def test_a_list_is_refused_where_the_wire_has_none_and_where_its_length_differs(protocol: str, tree: dict[str, Any]) -> None:
    (outcome,) = parse(200, json.dumps(tree).encode(), PROTOCOLS[protocol], [TOKENS])
    assert outcome.status is Status.INVALID
    assert ("2 numbers" if protocol == "native" else "no tokens") in outcome.message


def test_tokens_go_over_the_native_wire_only() -> None:
    with pytest.raises(ConfigError) as caught:
        HttpReward("r", 1.0, ["http://127.0.0.1:1/"], "paddlenlp", 1.0, {"tokens": True})
    assert "native" in caught.value.expected


def test_native_failures_keep_their_status() -> None:
    body = b'{"results": [{"status": "timeout", "message": "slow"}, {"status": "error", "message": "boom"}]}'
    outcomes = parse(200, body, PROTOCOLS["native"], ITEMS)
    assert [(o.status, o.message) for o in outcomes] == [(Status.TIMEOUT, "slow"), (Status.ERROR, "boom")]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_least_busy_endpoint_is_next() -> None:
    endpoints = RewardEndpoints(["a", "b"], 1.0)
    first, second, third = endpoints.take(), endpoints.take(), endpoints.take()
    assert first and second and third
    assert {first.url, second.url} == {"a", "b"}
    endpoints.give_back(second, True)
    fourth = endpoints.take()
    assert fourth and fourth.url == second.url


def test_a_dead_endpoint_is_left_alone_then_probed_by_one() -> None:
    clock = Clock()
    endpoints = RewardEndpoints(["a"], 1.0, clock)
    for _ in range(3):
        endpoint = endpoints.take()
        assert endpoint
        endpoints.give_back(endpoint, False)
    assert endpoints.take() is None
    assert endpoints.next_probe() == 1.0
    clock.now = 1.0
    probe = endpoints.take()
    assert probe and endpoints.take() is None
    endpoints.give_back(probe, False)
    clock.now = 2.5
    assert endpoints.take() is None, "the pause grows"
    clock.now = 3.0
    probe = endpoints.take()
    assert probe
    endpoints.give_back(probe, True)
    assert endpoints.take() and endpoints.take()


def test_failures_that_may_be_the_items_doing_do_not_count() -> None:
    endpoints = RewardEndpoints(["a"], 1.0)
    for _ in range(10):
        endpoint = endpoints.take()
        assert endpoint
        endpoints.give_back(endpoint, None)


def test_an_endpoint_that_misses_deadlines_and_answers_nothing_is_avoided() -> None:
    clock = Clock()
    endpoints = RewardEndpoints(["a", "b"], 1.0, clock)
    silent, other = endpoints.take(), endpoints.take()
    assert silent and other
    clock.now = 1.0
    for _ in range(3):
        endpoints.record_missed_deadline(silent)
    endpoints.give_back(silent, None)
    assert {endpoint.url for endpoint in (endpoints.take(), endpoints.take()) if endpoint} == {other.url}
    for _ in range(10):
        endpoints.record_missed_deadline(other)
    assert endpoints.take() is other, "the last one is asked all the same"


def test_deadlines_that_pass_while_others_are_answered_are_the_items_doing() -> None:
    clock = Clock()
    endpoints = RewardEndpoints(["a", "b"], 1.0, clock)
    busy = endpoints.take()
    assert busy
    clock.now = 0.5
    endpoints.give_back(busy, True)
    clock.now = 1.0
    for _ in range(10):
        endpoints.record_missed_deadline(busy)
    assert {endpoint.url for endpoint in (endpoints.take(), endpoints.take()) if endpoint} == {"a", "b"}


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [("ftp://host/", {}, "http://"), ("host:80", {}, "http://"), ("http://host", {"conurrency": 3}, "concurrency")],
)
async def test_what_cannot_be_asked_is_refused_at_load(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HttpReward("r", 1.0, [url], "paddlenlp", 1.0, options)
