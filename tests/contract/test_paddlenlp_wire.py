"""PaddleNLP's reward wire, byte for byte: its trainers against our server, and its servers behind our HTTP reward."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import requests

from polyreme.process.backoff import Backoff
from polyreme_reward.remote import endpoints
from support.raw_http import message, raw_server, reply
from support.rewards import EXACT, item, scoring, serving, summary
from support.waiting import until

FAILED = b'{"error_code":500,"error_msg":"%b","score":null}'
GOOD = b'{"error_code":0,"error_msg":"Success","score":[1.0,0.0]}'


def post(url: str, data: Any) -> requests.Response:
    """Sends a request as PaddleNLP's trainers do: a plain URL and three lists."""
    return requests.post(url, json=data)


async def ask(addresses: Any, data: Any) -> requests.Response:
    return await asyncio.to_thread(post, f"http://{addresses.http}", data)


async def test_a_trainer_of_theirs_gets_its_scores() -> None:
    async with serving(EXACT) as (_, _, addresses):
        answer = await ask(addresses, {"src": ["p", "q"], "tgt": ["3", "4"], "response": ["b8+5=3#3", "#5"]})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.content == GOOD
        assert json.loads(answer.text)["score"] == [1.0, 0.0]


async def test_special_tokens_in_their_responses_are_taken_out_where_the_configuration_names_them() -> None:
    async with serving(EXACT, special_tokens=["<eos>", "<pad>"]) as (_, _, addresses):
        answer = await ask(addresses, {"src": ["p"], "tgt": ["3"], "response": ["#3<eos><pad>"]})
        assert answer.json()["score"] == [1.0]


async def test_special_tokens_are_taken_off_prompts_and_labels_too(tmp_path: Path) -> None:
    """PaddleNLP decodes labels with their special tokens."""
    (tmp_path / "r.py").write_text(
        "def reward(prompt, templated_prompt):\n    return (prompt, templated_prompt) == ('p', '<s>p')\n"
    )
    async with serving({"name": "exact"}, {"file": str(tmp_path / "r.py")}, special_tokens=["<s>", "</s>"]) as (_, _, addresses):
        answer = await ask(addresses, {"src": ["<s>p"], "tgt": ["<s>42"], "response": ["42</s>"]})
        assert answer.json()["score"] == [2.0]


@pytest.mark.parametrize(
    ("data", "form", "key"),
    [
        ({"src": [], "tgt": [], "response": []}, b'{"error_code":0,"error_msg":"%b","score":[]}', "Success"),
        ({"src": ["p"], "tgt": ["3", "4"], "response": ["#3"]}, FAILED, "found 1, 2 and 1"),
        ({"src": ["p", "p"], "tgt": ["3", ""], "response": ["#3", "#3"]}, FAILED, "item 1: ERROR exact: expected a label"),
    ],
)
async def test_errors_are_theirs_but_never_zeros(data: Any, form: bytes, key: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(EXACT) as (_, _, addresses):
        answer = await ask(addresses, data)
        assert answer.status_code == 200
        assert key in message(answer.content, form)
    logged = [record.getMessage() for record in caplog.records if record.name == "polyreme_reward.http_errors"]
    assert [line.partition(":")[0] for line in logged] == ["a request to / failed"] * (form == FAILED)


async def test_a_body_of_another_shape_is_a_422_as_theirs_is() -> None:
    async with serving(EXACT) as (_, _, addresses):
        answer = await ask(addresses, {"src": ["p"], "response": ["#3"]})
        assert answer.status_code == 422
        assert answer.content == (
            b'{"detail":[{"type":"missing","loc":["body","tgt"],"msg":"Field required","input":{"src":["p"],"response":["#3"]}}]}'
        )


async def test_a_batch_beyond_the_queue_is_an_error_that_no_retry_repairs() -> None:
    async with serving(EXACT, queue=1) as (_, _, addresses):
        data = {"src": ["p"] * 2, "tgt": ["3"] * 2, "response": ["#3"] * 2}
        answer = await ask(addresses, data)
        assert "found 2" in message(answer.content, FAILED)


async def test_a_full_queue_is_a_429_in_their_form(tmp_path: Path) -> None:
    plugin, asked, gate = (tmp_path / name for name in ("gated.py", "asked", "gate"))
    plugin.write_text(
        f"import pathlib, time\ndef reward(response):\n    pathlib.Path({str(asked)!r}).touch()\n"
        f"    while not pathlib.Path({str(gate)!r}).exists():\n        time.sleep(0.01)\n    return 1.0\n"
    )
    async with serving({"file": str(plugin)}, queue=1) as (_, _, addresses):
        data = {"src": ["p"], "tgt": [""], "response": ["r"]}
        first = asyncio.ensure_future(ask(addresses, data))
        await until(asked.exists)
        refused = await ask(addresses, data)
        gate.touch()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert message(refused.content, b'{"error_code":429,"error_msg":"%b","score":null}')
        assert (await first).json()["score"] == [1.0]


def endpoint(server: Any, **options: Any) -> dict[str, Any]:
    return {"url": server.url, "protocol": "paddlenlp", "options": options}


async def test_their_server_is_sent_what_their_client_sends() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(GOOD))

    async with raw_server(handler) as server, scoring(endpoint(server, batch=2)) as scorer:
        items = [item("r", "l", response_raw="r<eos>"), item("s \u00e9", "m", prompt="q")]
        assert summary(await scorer.score(items)) == [("OK", 1.0), ("OK", 0.0)]
        sent = server.bodies[0]
        assert sent == b'{"src": ["p", "q"], "tgt": ["l", "m"], "response": ["r<eos>", "s \\u00e9"]}'
        theirs = requests.Request("POST", server.url, json=json.loads(sent)).prepare()
        assert theirs.body == sent
        assert b"\r\ncontent-type: application/json\r\n" in server.heads[0].lower()


async def test_connections_are_kept() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"error_code":0,"error_msg":"Success","score":[1]}'))

    async with raw_server(handler) as server, scoring(endpoint(server, concurrency=4)) as scorer:
        answers = await scorer.score([item("r")] * 100)
        assert summary(answers) == [("OK", 1.0)] * 100
        assert len(server.bodies) == 100
        assert server.connections <= 4


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (reply(b'{"error_code":500,"error_msg":"boom","score":[0]}'), "ERROR", "boom"),
        (reply(b'{"error_code":0,"error_msg":"Success","score":[1,1]}'), "INVALID", "found 2"),
        (reply(b'{"error_code":0,"error_msg":"Success","score":null}'), "INVALID", "a list"),
        (reply(b'{"error_code":0,"error_msg":"Success","score":[NaN]}'), "INVALID", "nan"),
        (reply(b'{"error_code":0,"error_msg":"Success","score":[1e999]}'), "INVALID", "inf"),
        (reply(b'{"error_code":0,"error_msg":"Success","score":["1"]}'), "INVALID", "'1'"),
        (reply(b'{"detail":[]}', "422 Unprocessable Entity"), "ERROR", "422"),
        (reply(b"moved", "302 Found", "location: http://elsewhere/\r\n"), "ERROR", "302"),
        (reply(b"<html>"), "INVALID", "JSON"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}", "TIMEOUT", "1 s"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}garbage", "ERROR", "error_code"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "ERROR", "HTTP reply"),
        (b"", "TIMEOUT", "1 s"),
    ],
)
async def test_what_their_server_cannot_answer_is_a_status(answer: bytes, status: str, said: str) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    within = 1.0 if status == "TIMEOUT" else 60.0
    async with raw_server(handler) as server, scoring(endpoint(server), item_timeout=within) as scorer:
        (scored,) = await scorer.score([item("r")])
        assert scored.status.name == status
        assert said in scored.message


@pytest.mark.parametrize("status", ["307 Temporary Redirect", "308 Permanent Redirect"])
async def test_a_redirect_within_the_origin_is_followed(status: str) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        moved = len(server.bodies) == 1
        writer.write(reply(b"", status, "location: /scores/\r\n") if moved else reply(b'{"error_code":0,"score":[1]}'))

    async with raw_server(handler) as server, scoring(endpoint(server)) as scorer:
        assert summary(await scorer.score([item("r")])) == [("OK", 1.0)]
        assert server.bodies[0] == server.bodies[1]
        assert server.heads[1].startswith(b"POST /scores/ ")


@pytest.mark.parametrize(
    ("status", "target"),
    [
        ("307 Temporary Redirect", "http://elsewhere:1/scores"),
        ("308 Permanent Redirect", "https://127.0.0.1/scores"),
        ("302 Found", "/scores"),
    ],
)
async def test_another_redirect_is_refused_and_its_target_named(status: str, target: str) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"", status, f"location: {target}\r\n"))

    async with raw_server(handler) as server, scoring(endpoint(server)) as scorer:
        (scored,) = await scorer.score([item("r")])
        assert (scored.status.name, target in scored.message, len(server.bodies)) == ("ERROR", True, 1)


async def test_redirects_without_end_are_refused() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"", "307 Temporary Redirect", "location: /again\r\n"))

    async with raw_server(handler) as server, scoring(endpoint(server)) as scorer:
        (scored,) = await scorer.score([item("r")])
        assert (scored.status.name, "/again" in scored.message, len(server.bodies)) == ("ERROR", True, 4)


async def test_a_server_out_of_its_range_is_invalid() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"error_code":0,"error_msg":"Success","score":[7]}'))

    async with raw_server(handler) as server, scoring(endpoint(server, min=0, max=1)) as scorer:
        (scored,) = await scorer.score([item("r")])
        assert (scored.status.name, "[0, 1]" in scored.message) == ("INVALID", True)


async def test_an_error_that_passes_is_tried_again() -> None:
    answers = [
        reply(b"", "500 Internal Server Error"),
        reply(b"", "429 Too Many Requests"),
        reply(b'{"error_code":0,"error_msg":"","score":[1]}'),
    ]

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async with raw_server(handler) as server, scoring(endpoint(server)) as scorer:
        assert summary(await scorer.score([item("r")])) == [("OK", 1.0)]


async def test_a_reset_connection_is_tried_again() -> None:
    times = 0

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal times
        times += 1
        if times < 3:
            writer.transport.abort()
        else:
            writer.write(reply(b'{"error_code":0,"error_msg":"","score":[1]}'))

    async with raw_server(handler) as server, scoring(endpoint(server)) as scorer:
        assert summary(await scorer.score([item("r")])) == [("OK", 1.0)]


@pytest.mark.parametrize(("pause", "within", "expected"), [(0.001, 60.0, ("OK", 1.0)), (0.5, 1.0, ("TIMEOUT", 0.0))])
async def test_an_answer_that_trickles_in_counts_only_when_it_ends_in_time(
    pause: float, within: float, expected: tuple[str, float]
) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        for byte in reply(b'{"error_code":0,"error_msg":"","score":[1]}'):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause)

    async with raw_server(handler) as server, scoring(endpoint(server), item_timeout=within) as scorer:
        assert summary(await scorer.score([item("r")])) == [expected]


async def test_one_item_that_breaks_a_batch_does_not_take_it_along() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        responses = json.loads(body)["response"]
        if "poison" in responses:
            writer.write(reply(b'{"error_code":500,"error_msg":"cannot parse","score":[0,0,0]}'))
        else:
            writer.write(reply(json.dumps({"error_code": 0, "error_msg": "", "score": [1.0] * len(responses)}).encode()))

    async with raw_server(handler) as server, scoring(endpoint(server, batch=3)) as scorer:
        answers = await scorer.score([item("a"), item("poison"), item("b")])
        assert summary(answers) == [("OK", 1.0), ("ERROR", 0.0), ("OK", 1.0)]


async def test_a_server_that_is_not_there_is_an_error_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_BACKOFF", Backoff(first=30.0, longest=30.0))
    async with raw_server(lambda body, writer: asyncio.sleep(0)) as server:
        gone = endpoint(server)
    async with scoring(gone) as scorer:
        (scored,) = await scorer.score([item("r")])
        assert scored.status.name == "ERROR"
        (scored,) = await scorer.score([item("r")])
        assert "next probe" in scored.message


async def test_servers_share_the_load_and_one_that_is_gone_does_no_harm() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"error_code":0,"error_msg":"","score":[1]}'))

    async with raw_server(handler) as gone:
        pass
    async with raw_server(handler) as one, raw_server(handler) as other:
        both = {"name": "r", "url": [one.url, gone.url, other.url], "protocol": "paddlenlp", "options": {"concurrency": 8}}
        async with scoring(both) as scorer:
            assert summary(await scorer.score([item("r")] * 100)) == [("OK", 1.0)] * 100
        assert len(one.bodies) > 20
        assert len(other.bodies) > 20
