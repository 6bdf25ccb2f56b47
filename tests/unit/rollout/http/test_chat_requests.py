"""Requests reach the engine's application as JSON that it can write, and chats in the form of data rows."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from polyreme.errors import DataError
from polyreme_rollout.http.http_app import JsonRequests, rewritten

PATH = "/v1/chat/completions"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.fixture
def client() -> httpx.AsyncClient:
    """A client of an application that answers with the body that it got."""
    app = FastAPI()

    @app.post("/v1/{rest:path}")
    async def echo(request: Request) -> Any:
        body = await request.body()
        assert len(body) == int(request.headers["content-length"])
        return {"got": body.decode()}

    app.add_middleware(JsonRequests)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_only_chats_are_rewritten(client: httpx.AsyncClient) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": PARTS}], "n": 2}
    given = {"model": "m", "messages": [{"role": "user", "content": "ab"}], "n": 2}
    assert json.loads((await client.post(PATH, json=body)).json()["got"]) == given
    assert json.loads((await client.post("/v1/completions", json=body)).json()["got"]) == body
    for other in (b"", b"[1]", b'{"messages": []}', b'{"messages": 3}', b'{"prompt": "x"}'):
        assert rewritten(other) == other


UNUSABLE = {
    "nothing": b"{",
    "not a number": b'{"a": NaN}',
    "a number beyond float64": b'{"a": 1e400}',
    "an integer beyond Python's limit": b'{"a": %s}' % (b"9" * 5000),
    "half of an escaped character": b'{"a": "\\ud800"}',
    "half of a character": b'{"a": "\xed\xa0\x80"}',
    "another encoding": b"\xff",
    "a key twice": b'{"a": 1, "a": 2}',
    "nesting": b"[" * 100_000,
}


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
@pytest.mark.parametrize("body", UNUSABLE.values(), ids=UNUSABLE)
async def test_json_that_others_cannot_write_is_a_400(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    reply = await client.post(path, content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)


async def test_a_message_that_cannot_be_read_is_an_error_of_the_request(client: httpx.AsyncClient) -> None:
    image = {"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {"url": "x"}}]}
    reply = await client.post(PATH, json={"messages": [{"role": "user", "content": "q"}, image]})
    assert reply.status_code == 400
    assert "message 2 of `messages`; found part 3, of type 'image_url'" in reply.json()["error"]["message"]
    deep = json.dumps({"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f", "parameters": "DEEP"}]})
    nested = deep.replace('"DEEP"', '{"a":' * 600 + "1" + "}" * 600)
    assert (await client.post(PATH, content=nested)).status_code == 400
    with pytest.raises(DataError, match="tool 1"):
        rewritten(json.dumps({"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function"}]}).encode())


def test_tools_and_calls_have_the_form_of_the_schema_and_reach_the_template_unchanged() -> None:
    function = {"parameters": {"type": "object"}, "name": "f"}
    calls = [{"function": {"name": "f", "arguments": {"x": "é"}}}]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    body = {"messages": messages, "tools": [function], "chat_template_kwargs": {"enable_thinking": False}}
    found = json.loads(rewritten(json.dumps(body).encode()))
    tools = [{"type": "function", "function": function}]
    assert found["tool_choice"] == "none" and found["chat_template_kwargs"] == {"tools": tools, "enable_thinking": False}
    assert json.dumps(found["tools"]) == json.dumps(tools), "in the order of the request"
    (call,) = found["messages"][1]["tool_calls"]
    assert call == {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    assert "tools" not in json.loads(rewritten(json.dumps({"messages": messages, "tools": []}).encode()))
    asked = {**body, "tool_choice": "auto"}
    assert json.loads(rewritten(json.dumps(asked).encode()))["tool_choice"] == "auto"
