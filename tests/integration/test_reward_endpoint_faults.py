"""Reward servers that hang, reset connections or send invalid replies, mixed with good ones: every good item gets its score, every bad one
a status."""

import asyncio
import gzip
import json
import random
import socket
import time
from typing import Any

import psutil
import pytest

from polyreme.process.backoff import Backoff
from polyreme_reward.remote import endpoints
from polyreme_reward.scorer import Scored, Scorer
from support.raw_http import raw_server, reply
from support.rewards import item, scoring, serving
from support.waiting import until

GOOD = b'{"error_code":0,"error_msg":"Success","score":[%b]}'
FAULTS = {
    "hang": "TIMEOUT",
    "hang_in_body": "TIMEOUT",
    "trickle": "TIMEOUT",
    "promise_more": "ERROR",
    "promise_less": "INVALID",
    "reset": "ERROR",
    "close": "ERROR",
    "broken_chunks": "ERROR",
    "no_http": "ERROR",
    "always_500": "ERROR",
    "says_500": "ERROR",
    "nan": "INVALID",
    "text": "INVALID",
    "short": "INVALID",
    "long": "INVALID",
    "nothing": "INVALID",
    "html": "INVALID",
    "huge_number": "INVALID",
    "compressed": "INVALID",
}
RECOVERS = ("500_then_200", "reset_then_200", "429_then_200", "slow")


class Server:
    """A server whose behaviour depends on the response. An even number is right, an odd one wrong."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    async def __call__(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        (text,) = json.loads(body)["response"]
        fault = text.partition(" ")[0]
        self.seen[text] = self.seen.get(text, 0) + 1
        if fault in RECOVERS and (self.seen[text] > 1 or fault == "slow"):
            await asyncio.sleep(0.1 * (fault == "slow"))
            fault = text.partition(" ")[2]
        elif fault in RECOVERS:
            fault = fault.partition("_")[0]
        if fault.isdigit():
            answers = {"500": reply(b"oh", "500 Internal Server Error"), "429": reply(b"", "429 Too Many Requests")}
            writer.write(answers.get(fault) or reply(GOOD % str(1 - int(fault) % 2).encode()))
        elif fault in ("hang", "trickle", "hang_in_body"):
            whole = reply(GOOD % b"1")
            for byte in {"hang": b""}.get(fault, whole[:-5]):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.5 if fault == "trickle" else 0)
            await asyncio.sleep(1000)
        elif fault == "reset":
            writer.transport.abort()
        else:
            whole = reply(GOOD % b"1")
            writer.write(
                {
                    "promise_more": whole.replace(b"content-length: ", b"content-length: 9"),
                    "promise_less": whole.replace(b"content-length: ", b"content-length: 1\r\nx: "),
                    "broken_chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
                    "no_http": b"220 smtp ready\r\n\r\n",
                    "always_500": reply(GOOD % b"1", "500 Internal Server Error"),
                    "says_500": reply(b'{"error_code":500,"error_msg":"boom","score":[0]}'),
                    "nan": reply(GOOD % b"NaN"),
                    "text": reply(GOOD % b'"1"'),
                    "short": reply(GOOD % b""),
                    "long": reply(GOOD % b"1,1"),
                    "nothing": reply(GOOD % b"null"),
                    "html": reply(b"<html>502 Bad Gateway</html>"),
                    "huge_number": reply(GOOD % b"1e999"),
                    "compressed": reply(gzip.compress(GOOD % b"1"), headers="content-encoding: gzip\r\n"),
                    "close": b"",
                }[fault]
            )
            writer.close()


WAITS = [fault for fault, status in FAULTS.items() if status == "TIMEOUT"]
QUICK = [fault for fault in FAULTS if fault not in WAITS]


async def scored(scorer: Scorer, texts: list[str]) -> list[Scored]:
    """The answers for concurrent requests of 50 texts each."""
    parts = [scorer.score([item(text) for text in texts[start : start + 50]]) for start in range(0, len(texts), 50)]
    return [answer for part in await asyncio.gather(*parts) for answer in part]


@pytest.mark.parametrize(("faults", "bad", "good"), [(QUICK, 80, 240), (WAITS, 20, 100)], ids=["answers", "silence"])
async def test_random_faults_among_good_answers(faults: list[str], bad: int, good: int) -> None:
    """Items that wait for their deadline run separately, with a deadline of ten times the time of the good answers on this machine."""
    rng = random.Random(0)
    right = [str(n) for n in range(2000, 2000 + good)]
    texts = [f"{rng.choice(faults)} {n}" for n in range(bad)] + right
    if faults is QUICK:
        texts += [f"{rng.choice(RECOVERS)} {n}" for n in range(1000, 1030)]
    rng.shuffle(texts)
    process = psutil.Process()
    files = process.num_fds()
    async with raw_server(Server()) as one, raw_server(Server()) as other:
        urls: Any = [one.url, other.url]
        far = {"name": "far", "url": urls, "protocol": "paddlenlp", "options": {"concurrency": 32, "tries": 3}}
        start = time.monotonic()
        async with scoring(far, item_timeout=300.0) as scorer:
            await scored(scorer, right)
        alone = time.monotonic() - start
        async with scoring(far, item_timeout=60.0 + alone if faults is QUICK else 3.0 + 10 * alone) as scorer:
            answers = await scored(scorer, texts)
            assert scorer.inside == 0
    for text, answer in zip(texts, answers, strict=True):
        fault, _, number = text.rpartition(" ")
        if fault in FAULTS:
            assert (answer.status.name, answer.score, bool(answer.message)) == (FAULTS[fault], 0.0, True), (text, answer)
        else:
            assert (answer.status.name, answer.score) == ("OK", 1.0 - int(number) % 2), (text, answer)
    await until(lambda: process.num_fds() <= files + 2)  # the servers also close their connections


async def test_a_machine_that_is_gone_without_a_word_costs_few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something in front of it, such as a switch, accepts its connections, and no reply ever arrives."""
    monkeypatch.setattr(endpoints, "_BACKOFF", Backoff(first=600.0, longest=600.0))
    items = [item(str(2 * n)) for n in range(8)]
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as gone:
        async with raw_server(Server()) as there:
            urls: Any = [f"http://127.0.0.1:{gone.getsockname()[1]}/", there.url]
            async with scoring({"name": "far", "url": urls, "protocol": "paddlenlp"}, item_timeout=3.0) as scorer:
                first = [answer.status.name for answer in await scorer.score(items)]
                again = [answer.status.name for answer in await scorer.score(items)]
    assert first.count("TIMEOUT") >= 3 and again == ["OK"] * 8


async def test_a_servers_own_time_to_come_back_is_kept() -> None:
    loop = asyncio.get_running_loop()
    times: list[float] = []

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        times.append(loop.time())
        busy = reply(b"", "429 Too Many Requests", "retry-after: 1\r\n")
        writer.write(busy if len(times) == 1 else reply(GOOD % b"1"))

    async with raw_server(handler) as server, scoring({"url": server.url, "protocol": "paddlenlp"}) as scorer:
        (answer,) = await scorer.score([item("r")])
    assert (answer.status.name, len(times)) == ("OK", 2)
    assert times[1] - times[0] >= 1.0


@pytest.mark.parametrize("protocol", ["paddlenlp", "openrlhf", "native"])
async def test_our_own_server_behind_each_wire_fails_with_statuses(protocol: str) -> None:
    """A failure passes through two services and stays a failure."""
    async with serving({"name": "exact"}) as (_, _, addresses):
        path = {"paddlenlp": "", "openrlhf": "get_reward", "native": "v1/score"}[protocol]
        far = {"name": "far", "url": f"http://{addresses.http}/{path}", "protocol": protocol, "options": {"batch": 3, "tries": 1}}
        async with scoring(far) as scorer:
            answers = await scorer.score([item("3"), item("3", ""), item("4")])
    assert [(a.status.name, a.score) for a in answers] == [("OK", 1.0), ("ERROR", 0.0), ("OK", 0.0)]
    assert "label" in answers[1].message
