"""OpenRLHF's remote reward wire: its trainers against our server, and its servers behind our HTTP reward."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.raw_http import message, raw_server, reply
from support.rewards import EXACT, item, scoring, serving

UNPROCESSABLE = b'{"detail":[{"type":"value_error","loc":["body"],"msg":"%b"}]}'
PROMPTS = "def reward(prompt, templated_prompt):\n    return (prompt, templated_prompt) == ('p ', '<s>p ')\n"
MISSING = b'{"detail":[{"type":"missing","loc":["body","query"],"msg":"%b","input":{"prompts":["p"]}}]}'


async def theirs(url: str, data: dict[str, Any], tries: int = 1) -> dict[str, Any]:
    """Sends a request as OpenRLHF's trainers do: a session for each request, a total timeout, errors by status, several tries."""
    timeout = aiohttp.ClientTimeout(total=180)
    for left in reversed(range(tries)):
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=data) as response:
                response.raise_for_status()
                return await response.json()
        except aiohttp.ClientError:
            if not left:
                raise
    raise AssertionError


async def raw(url: str, data: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=data) as response:
        assert response.headers["content-type"] == "application/json"
        return response.status, await response.read()


async def test_a_trainer_of_theirs_gets_its_rewards() -> None:
    async with serving({**EXACT, "weight": 2.0}, special_tokens=["<eos>"]) as (_, _, addresses):
        url = f"http://{addresses.http}/get_reward"
        data = {"query": ["p#3<eos>"], "prompts": ["p"], "labels": ["3"]}
        assert await theirs(url, data) == {"rewards": [2.0], "scores": [2.0], "extra_logs": {"exact": [1.0]}}
        assert await raw(url, data) == (200, b'{"rewards":[2.0],"scores":[2.0],"extra_logs":{"exact":[1.0]}}')
        nobody: dict[str, Any] = {"query": [], "prompts": [], "labels": []}
        assert await raw(url, nobody) == (200, b'{"rewards":[],"scores":[],"extra_logs":{}}')


async def test_older_trainers_send_the_query_alone() -> None:
    async with serving({"name": "length"}) as (_, _, addresses):
        answer = await theirs(f"http://{addresses.http}/get_reward", {"query": ["one two", "three"]})
        assert answer["rewards"] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("data", "form", "key"),
    [
        ({"query": ["#3"], "prompts": [""], "labels": [None]}, UNPROCESSABLE, "item 0: ERROR exact: expected a label"),
        (
            {"query": ["#3", "#3"], "prompts": ["", ""], "labels": ["3", ""]},
            UNPROCESSABLE,
            "item 1: ERROR exact: expected a label",
        ),
        ({"query": ["#3"], "prompts": [], "labels": ["3"]}, UNPROCESSABLE, "found 1, 0 and 1"),
        ({"prompts": ["p"]}, MISSING, "Field required"),
    ],
)
async def test_a_failure_is_an_http_error_and_logged(
    data: dict[str, Any], form: bytes, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(EXACT) as (_, _, addresses):
        url = f"http://{addresses.http}/get_reward"
        with pytest.raises(aiohttp.ClientResponseError) as caught:
            await theirs(url, data, tries=2)
        status, body = await raw(url, data)
        assert status == caught.value.status == 422
        assert key in message(body, form)
    logged = [record.getMessage() for record in caplog.records if record.name == "polyreme_reward.http_errors"]
    assert len(logged) == 3 and all(line.startswith("a request to /get_reward failed: ") for line in logged)


async def test_a_failure_that_may_pass_is_a_500_for_their_retries(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def reward(response):\n    raise OSError('disk')\n")
    async with serving({"file": str(tmp_path / "r.py")}) as (_, _, addresses):
        status, body = await raw(f"http://{addresses.http}/get_reward", {"query": ["a"]})
        assert status == 500 and b"disk" in body


async def test_labels_may_be_numbers() -> None:
    async with serving({"name": "exact"}) as (_, _, addresses):
        data = {"query": ["42", "0.5", "x", "42"], "prompts": [""] * 4, "labels": [42, 0.5, "x", "41"]}
        assert (await theirs(f"http://{addresses.http}/get_reward", data))["rewards"] == [1.0, 1.0, 1.0, 0.0]


async def test_special_tokens_are_taken_off_prompt_and_label_too(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(PROMPTS)
    async with serving({"name": "exact"}, {"file": str(tmp_path / "r.py")}, special_tokens=["<s>", "<eos>"]) as (_, _, addresses):
        data = {"query": ["<s>p 42<eos>"], "prompts": ["<s>p "], "labels": ["<s>42"]}
        assert (await theirs(f"http://{addresses.http}/get_reward", data))["rewards"] == [2.0]


@pytest.mark.parametrize("query", ["p#3<eos>", "<s>p#3<eos>", "<pad><pad><s>p#3<eos>", "<pad>" * 200_000 + "p#3"], ids=range(4))
async def test_a_prompt_is_found_behind_what_a_decoded_sequence_begins_with(query: str) -> None:
    async with serving({"name": "exact"}, special_tokens=["<eos>", "<s>", "<pad>", ""]) as (_, _, addresses):
        data = {"query": [query], "prompts": ["p"], "labels": ["#3"]}
        assert (await theirs(f"http://{addresses.http}/get_reward", data))["rewards"] == [1.0]


async def test_a_query_without_its_prompt_is_refused_not_scored() -> None:
    """A trainer that truncates a long prompt in the query still sends the complete prompt."""
    async with serving({"name": "length"}) as (_, _, addresses):
        status, body = await raw(
            f"http://{addresses.http}/get_reward", {"query": ["a b", "ompt yes"], "prompts": ["a", "prompt"]}
        )
        assert status == 422
        found = message(body, UNPROCESSABLE)
        assert found.startswith("item 1: ") and "'ompt yes'" in found


async def test_their_server_is_sent_what_their_client_sends_and_its_logs_are_parts() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"rewards":[1.5],"scores":[1],"extra_logs":{"format":[0.5],"note":["x"]}}'))

    async with raw_server(handler) as server:
        reward = {"name": "rm", "url": server.url, "protocol": "openrlhf", "weight": 2.0}
        async with scoring(reward) as scorer:
            (answer,) = await scorer.score([item("r", "l", response_raw="r<eos>")])
        assert answer.score == 3.0
        assert [(p.name, p.raw) for p in answer.parts] == [("rm", 1.5), ("rm/scores", 1.0), ("rm/format", 0.5)]
        assert server.bodies == [b'{"query": ["pr<eos>"], "prompts": ["p"], "labels": ["l"]}']


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (reply(b'{"scores":[1]}'), "INVALID", "'rewards'"),
        (reply(b'{"rewards":[1,2]}'), "INVALID", "found 2"),
        (reply(b'{"rewards":[null]}'), "INVALID", "None"),
        (reply(b'{"rewards":[NaN]}'), "INVALID", "nan"),
        (reply(b'{"rewards":1}'), "INVALID", "a list"),
        (reply(b"Internal Server Error", "500 Internal Server Error"), "ERROR", "found 500: Internal Server Error"),
        (reply(b'{"detail":[]}', "422 Unprocessable Entity"), "ERROR", 'found 422: {"detail":[]}'),
    ],
)
async def test_what_their_server_cannot_answer_is_a_status(answer: bytes, status: str, said: str) -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with (
        raw_server(handler) as server,
        scoring({"url": server.url, "protocol": "openrlhf", "options": {"tries": 1}}) as scorer,
    ):
        (scored,) = await scorer.score([item("r")])
    assert (scored.status.name, said in scored.message) == (status, True), scored.message
