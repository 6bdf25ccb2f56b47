"""The /v1 of engines that have none of their own, over the simulated engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from polyreme_rollout.engine.plain_openai import make_openai_app
from polyreme_rollout.engine.protocol import EngineRequest, NewTokens
from polyreme_rollout.testing.simulated_engine import WEIGHT_NAMES, DecimalCodec, Lengths, SimulatedInferenceEngine


async def salt() -> str:
    return "one"


@asynccontextmanager
async def served() -> AsyncIterator[httpx.AsyncClient]:
    engine = SimulatedInferenceEngine(WEIGHT_NAMES, 64, 50, lengths=Lengths(1000.0))
    transport = httpx.ASGITransport(make_openai_app(engine, "policy", salt, DecimalCodec()))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client
    engine.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with served() as client:
        yield client


CHAT = {"messages": [{"role": "user", "content": "5 6 7"}], "max_tokens": 20, "temperature": 0}


async def test_a_chat_is_answered_with_its_usage(client: httpx.AsyncClient) -> None:
    reply = (await client.post("/v1/chat/completions", json=CHAT)).json()
    answer = reply["choices"][0]
    assert (answer["message"]["role"], answer["finish_reason"]) == ("assistant", "length")
    assert len(answer["message"]["content"].split()) == 20
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}


async def test_a_streamed_chat_has_the_text_of_the_whole_one(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]["content"]
    lines = (await client.post("/v1/chat/completions", json={**CHAT, "stream": True})).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({**CHAT, "tools": []}, 422),
        ({**CHAT, "n": 2}, 422),
        ({**CHAT, "model": "other"}, 404),
        ({**CHAT, "max_tokens": 100}, 400),
        ({**CHAT, "messages": [{"role": "user", "content": "99"}]}, 400),
        ({**CHAT, "messages": [{"role": "user", "content": " "}]}, 400),
    ],
)
async def test_what_it_cannot_do_is_refused(client: httpx.AsyncClient, body: dict[str, Any], status: int) -> None:
    assert (await client.post("/v1/chat/completions", json=body)).status_code == status


async def test_two_replicas_have_their_own_answers(client: httpx.AsyncClient) -> None:
    """Otherwise an evaluation over a gateway counts each answer twice."""
    asked = {**CHAT, "temperature": 1}
    async with served() as other:
        one, two = [(await each.post("/v1/chat/completions", json=asked)).json()["choices"] for each in (client, other)]
        assert one != two
        same = [(await each.post("/v1/chat/completions", json=asked | {"seed": 3})).json()["choices"] for each in (client, other)]
        assert same[0] == same[1]


class WatchedEngine(SimulatedInferenceEngine):
    """`began` and `ended`: of its newest request."""

    def __init__(self) -> None:
        super().__init__(WEIGHT_NAMES, 64, 50, step_seconds=3600.0)
        self.began, self.ended = asyncio.Event(), asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        self.began.set()
        try:
            async for each in super().generate(request):
                yield each
        finally:
            self.ended.set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_ends_with_its_client(stream: bool) -> None:
    engine = WatchedEngine()
    body = [{"type": "http.request", "body": json.dumps({**CHAT, "stream": stream}).encode()}]

    async def receive() -> Any:
        if body:
            return body.pop()
        await engine.began.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await asyncio.wait_for(make_openai_app(engine, "policy", salt, DecimalCodec())(scope, receive, send), 300)
    await asyncio.wait_for(engine.ended.wait(), 300)
    engine.close()
