"""A reply of /v1 names the policy versions that sampled it, for any split into messages."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from polyreme_rollout.http.reply_version import EXACT_HEADER, HEADER, MIN_HEADER, VersionedReplies

CHAT = {"object": "chat.completion", "choices": [{"text": "é\u2028"}], "system_fingerprint": "engine"}
EVENTS = [{"choices": [{"delta": {"content": text}}]} for text in "äbc"]
STREAM = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in EVENTS).encode() + b"data: [DONE]\n\n"


class Replier:
    """An application that sends these pieces of one body. The served version is `versions[0]` before the first piece, and so on."""

    def __init__(self, content_type: str, pieces: list[bytes], versions: list[int | None]) -> None:
        self.content_type, self.pieces, self.versions = content_type, pieces, iter(versions)
        self.now: int | None = next(self.versions)

    async def version(self) -> int | None:
        return self.now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", self.content_type.encode())]
        if "json" in self.content_type:
            headers.append((b"content-length", str(sum(map(len, self.pieces))).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(self.pieces, start=1):
            self.now = next(self.versions, self.now)
            await send({"type": "http.response.body", "body": piece, "more_body": number < len(self.pieces)})


async def ask(app: Replier, headers: dict[str, str] | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(VersionedReplies(app, app.version))
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
        return await client.get("/v1/anything", headers=headers)


def cut(body: bytes, places: list[int]) -> Iterator[bytes]:
    ends = sorted({place % (len(body) + 1) for place in places} | {0, len(body)})
    for start, end in itertools.pairwise(ends):
        yield body[start:end]


def events(body: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


@given(st.lists(st.integers(0, 300), max_size=5))
async def test_a_completion_names_its_versions(places: list[int]) -> None:
    pieces = list(cut(json.dumps(CHAT, ensure_ascii=False).encode(), places))
    one = await ask(Replier("application/json", pieces, [7]))
    assert (one.headers[HEADER], one.json()) == ("7", CHAT | {"system_fingerprint": "policy-7"})
    assert int(one.headers["content-length"]) == len(one.content)
    two = await ask(Replier("application/json", pieces, [7, *[8] * len(pieces)]))
    assert (two.headers[HEADER], two.json()["system_fingerprint"]) == ("7-8", "policy-7-8")


@given(st.lists(st.integers(0, 300), max_size=8))
async def test_each_event_names_the_versions_up_to_it(places: list[int]) -> None:
    pieces = list(cut(STREAM, places))
    same = await ask(Replier("text/event-stream; charset=utf-8", pieces, [7]))
    assert events(same.content) == [event | {"system_fingerprint": "policy-7"} for event in EVENTS]
    assert same.content.count(b"\n\n") == STREAM.count(b"\n\n")
    later = await ask(Replier("text/event-stream; charset=utf-8", pieces, [7, *range(8, 8 + len(pieces))]))
    assert later.headers[HEADER] == "7"
    named = [int(event["system_fingerprint"].rpartition("-")[2]) for event in events(later.content)]
    assert named == sorted(named) and named[0] >= 8 and named[-1] <= 7 + len(pieces)


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b'{"object":"list","data":[]}'),
        ("application/json", b"[1]"),
        ("application/json", b"{no json"),
        ("text/plain", b'data: {"choices": []}\n'),
        ("text/event-stream", b": a comment\n\ndata: {no json\n\n"),
    ],
)
async def test_any_other_body_is_passed_on_as_it_is(content_type: str, body: bytes) -> None:
    reply = await ask(Replier(content_type, [body], [3]))
    assert (reply.content, reply.headers[HEADER]) == (body, "3")


@pytest.mark.parametrize("versions", [[7, None], [None]])
async def test_without_a_version_nothing_is_answered(versions: list[int | None]) -> None:
    """The tokens may be of a version that has failed its canary."""
    reply = await ask(Replier("application/json", [json.dumps(CHAT).encode()], versions))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "policy_version")
    pieces = [line + b"\n" for line in STREAM.split(b"\n")[:-1]]
    stream = await ask(Replier("text/event-stream", pieces, [7, 7, 7, None]))
    *good, error = [json.loads(line.removeprefix(b"data: ")) for line in stream.content.split(b"\n") if line]
    assert good == [EVENTS[0] | {"system_fingerprint": "policy-7"}]
    assert error["error"]["code"] == "policy_version"


@pytest.mark.parametrize(
    ("header", "value", "served", "status"),
    [
        *((MIN_HEADER, "7", served, status) for served, status in ((6, 412), (7, 200), (8, 200), (None, 412))),
        *((EXACT_HEADER, "7", served, status) for served, status in ((6, 412), (7, 200), (8, 412), (None, 412))),
        (MIN_HEADER, "new", 7, 400),
    ],
)
async def test_a_request_asks_for_a_version(header: str, value: str, served: int | None, status: int) -> None:
    reply = await ask(Replier("application/json", [json.dumps(CHAT).encode()], [served]), {header: value})
    assert reply.status_code == status
    if status == 412:
        assert reply.headers[HEADER] == ("none" if served is None else str(served))
        assert f"found {served}" in reply.json()["error"]["message"]


async def test_a_completion_that_another_version_ended_is_refused() -> None:
    reply = await ask(Replier("application/json", [json.dumps(CHAT).encode()], [7, 8]), {EXACT_HEADER: "7"})
    assert (reply.status_code, reply.headers[HEADER]) == (412, "7-8")
    assert reply.json()["error"]["code"] == "policy_version"
    assert int(reply.headers["content-length"]) == len(reply.content)


async def test_a_stream_ends_with_an_error_where_another_version_begins() -> None:
    pieces = [line + b"\n" for line in STREAM.split(b"\n")[:-1]]
    reply = await ask(Replier("text/event-stream", pieces, [7, 7, 7, 8]), {EXACT_HEADER: "7"})
    *good, error = [json.loads(line.removeprefix(b"data: ")) for line in reply.content.split(b"\n") if line]
    assert good == [EVENTS[0] | {"system_fingerprint": "policy-7"}]
    assert error["error"]["message"] == "expected policy version 7; found 8"
