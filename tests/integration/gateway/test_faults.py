"""Replicas that fail, stall or swap during a request, and clients that disconnect."""

import asyncio
import json
import logging

import pytest
from redis.asyncio import Redis
from starlette.types import Send

from polyreme.errors import StoreError
from polyreme.experience.leases import Registry
from polyreme.experience.run import Run
from support.gateways import Answer, gateway, reply_with, scripted_replica, shows, stream_of
from support.waiting import until

BODY = b'{"choices":[],"system_fingerprint":"policy-3"}'
EVENT = b'data: {"choices":[],"system_fingerprint":"policy-3"}\n\n'
DONE = b"data: [DONE]\n\n"
IDLE = "polyreme_gateway_active_requests 0.0"
STREAM = {"prompt": "a", "stream": True}


async def unavailable(body: bytes, send: Send) -> None:
    await reply_with(b'{"status":"draining"}', status=503)(body, send)


@pytest.mark.parametrize(
    "failing",
    [unavailable, stream_of(breaks=True), stream_of(EVENT[:-1], breaks=True), stream_of(EVENT[:-1])],
    ids=["refuses", "is lost before the first event", "is lost within the first event", "ends within the first event"],
)
async def test_a_request_goes_on_elsewhere_while_nothing_was_sent(run: Run, failing: Answer) -> None:
    async with (
        scripted_replica(run, "failing", failing, version=3) as first,
        scripted_replica(run, "good", stream_of(EVENT, DONE), version=3, load=9) as good,
        gateway(run) as http,
    ):
        reply = await http.post("/v1/completions", json=STREAM)
        assert (reply.status_code, reply.content) == (200, EVENT + DONE)
        assert reply.headers["polyreme-replica"] == good.id
        assert first.bodies == good.bodies
        assert "polyreme_gateway_retries_total 1.0" in (await http.get("/metrics")).text


async def test_a_replica_that_has_just_lost_its_version_costs_one_attempt(run: Run) -> None:
    async with (
        scripted_replica(run, "good", reply_with(BODY), version=3, load=9) as good,
        scripted_replica(run, "moved", reply_with(BODY), version=3) as moved,
        gateway(run, poll_interval=3600.0) as http,  # only the request itself detects it
    ):
        moved.report(None)
        reply = await http.post("/v1/completions", json={"prompt": "a"})
        assert (reply.status_code, reply.headers["polyreme-replica"]) == (200, good.id)
        assert moved.bodies == []


async def test_no_replica_that_answers_is_a_503(run: Run) -> None:
    async with (
        scripted_replica(run, "a", unavailable, version=3),
        scripted_replica(run, "b", unavailable, version=3),
        gateway(run) as http,
    ):
        reply = await http.post("/v1/completions", json={"prompt": "a"})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["error"]["type"] == "server_error"


async def stalls(body: bytes, send: Send) -> None:
    await asyncio.Event().wait()


async def test_a_request_goes_on_elsewhere_when_its_replica_has_vanished(run: Run) -> None:
    async with (
        scripted_replica(run, "vanished", stalls, version=3) as vanished,
        scripted_replica(run, "good", reply_with(BODY), version=3, load=9) as good,
        gateway(run, leave=0.0) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
        await asyncio.wait_for(vanished.asked.wait(), 300)
        await vanished.lease.aclose()
        reply = await asking
        assert (reply.status_code, reply.headers["polyreme-replica"]) == (200, good.id)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_stream_outlasts_the_lease_while_its_replica_may_drain(run: Run, drains: bool) -> None:
    go_on = asyncio.Event()
    async with (
        scripted_replica(run, "a", stream_of(EVENT, EVENT, DONE, go_on=go_on), version=3) as replica,
        gateway(run, leave=3600.0 if drains else 0.0) as http,
        http.stream("POST", "/v1/completions", json=STREAM) as reply,
    ):
        await replica.lease.aclose()
        await until(lambda: shows(http, "polyreme_gateway_replicas 0.0"))
        if drains:
            go_on.set()
        content = await reply.aread()
    assert content.startswith(EVENT) and content.endswith(DONE)
    assert (content == EVENT + EVENT + DONE) is drains
    assert (b"answer_lost" in content) is not drains


@pytest.mark.parametrize("breaks", [False, True])
async def test_an_error_event_of_the_replica_is_the_only_one(run: Run, breaks: bool) -> None:
    error = b'data: {"error":{"code":"policy_version"}}\n\n'
    async with scripted_replica(run, "a", stream_of(EVENT, error, breaks=breaks), version=3), gateway(run) as http:
        reply = await http.post("/v1/completions", json=STREAM)
        assert reply.content == EVENT + error + DONE
        await until(lambda: shows(http, "polyreme_gateway_broken_streams_total 1.0"))


@pytest.mark.parametrize("lost", [stream_of(EVENT, EVENT[:9], breaks=True), stream_of(EVENT, EVENT[:9])])
async def test_a_stream_that_is_lost_ends_with_an_error(run: Run, lost: Answer) -> None:
    async with scripted_replica(run, "a", lost, version=3) as replica, gateway(run) as http:
        reply = await http.post("/v1/completions", json=STREAM)
        first, error, done, rest = reply.content.split(b"\n\n")
        assert (first + b"\n\n", done + b"\n\n", rest) == (EVENT, DONE, b"")
        found = json.loads(error.removeprefix(b"data: "))["error"]
        assert (found["code"], found["type"]) == ("answer_lost", "server_error")
        assert replica.id in found["message"]
        await until(lambda: shows(http, "polyreme_gateway_broken_streams_total 1.0"))


async def test_a_version_that_was_asked_for_is_not_replaced_by_another(run: Run) -> None:
    base = (await run.config()).name
    unaware = gateway(run, poll_interval=3600.0)  # it does not notice the swap
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, unaware as http:
        replica.report(4)
        refused = await http.post("/v1/completions", json={"prompt": "a", "model": f"{base}@3"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_answer")
        allowed = await http.post("/v1/completions", json={"prompt": "a"})
        assert allowed.headers["polyreme-policy-version"] == "4"


@pytest.mark.parametrize("model", ["@3", ""])
async def test_a_swap_within_a_stream_ends_it_if_a_version_was_asked_for(run: Run, model: str) -> None:
    base, go_on = (await run.config()).name, asyncio.Event()
    async with (
        scripted_replica(run, "a", stream_of(EVENT, EVENT, DONE, go_on=go_on), version=3) as replica,
        gateway(run) as http,
        http.stream("POST", "/v1/completions", json={**STREAM, "model": base + model}) as reply,
    ):
        parts = reply.aiter_raw()
        content = await anext(parts)
        replica.report(4)
        go_on.set()
        content += b"".join([part async for part in parts])
    assert (b'"code":"policy_version"' in content) is bool(model)
    assert (b"policy-3-4" in content) is not bool(model)
    assert content.endswith(DONE)


async def test_a_stream_that_another_version_begins_leaves_the_request_to_another_replica(run: Run) -> None:
    base, go_on = (await run.config()).name, asyncio.Event()

    async def swaps(asked: bytes, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await go_on.wait()
        await send({"type": "http.response.body", "body": EVENT + DONE})

    async with (
        scripted_replica(run, "good", reply_with(EVENT + DONE, "text/event-stream"), version=3, load=9) as good,
        scripted_replica(run, "swaps", swaps, version=3) as moved,
        gateway(run) as http,
    ):
        asking = asyncio.create_task(http.post("/v1/completions", json={**STREAM, "model": f"{base}@3"}))
        await moved.asked.wait()
        moved.report(4)
        go_on.set()
        reply = await asking
        assert (reply.status_code, reply.content, reply.headers["polyreme-replica"]) == (200, EVENT + DONE, good.id)


async def test_a_request_ends_at_its_deadline(run: Run) -> None:
    async with scripted_replica(run, "a", stalls, version=3), gateway(run, seconds=0.2) as http:
        reply = await http.post("/v1/completions", json={"prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")


async def test_a_stream_ends_at_its_deadline(run: Run) -> None:
    async with (
        scripted_replica(run, "a", stream_of(EVENT, EVENT, go_on=asyncio.Event()), version=3),
        gateway(run, seconds=1.0) as http,
        http.stream("POST", "/v1/completions", json=STREAM) as reply,
    ):
        content = b"".join([part async for part in reply.aiter_raw()])
        if reply.status_code == 200:  # otherwise the machine was too slow for the first event
            assert content.startswith(EVENT) and content.endswith(DONE)
        assert b'"code": "timeout"' in content


async def test_a_client_that_reads_nothing_keeps_its_place_no_longer_than_the_deadline(run: Run) -> None:
    async def endless(body: bytes, send: Send) -> None:
        event = b": %b\n\n" % (b"x" * (1 << 20))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while True:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)

    async def ended() -> bool:
        return "polyreme_gateway_requests_total{" in (await http.get("/metrics")).text

    async with scripted_replica(run, "a", endless, version=3), gateway(run, seconds=1.0, last_word=0.05) as http:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port, limit=1)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        await until(ended)
        await until(lambda: shows(http, IDLE))
        writer.transport.abort()


async def test_a_body_that_does_not_end_takes_a_place_until_the_deadline(run: Run) -> None:
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, gateway(run, seconds=1.0) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"prompt')
        assert b" 504 " in await asyncio.wait_for(reader.readline(), 300)
        assert b'"code": "timeout"' in await asyncio.wait_for(reader.readuntil(b"}}"), 300)
        await until(lambda: shows(http, IDLE))
        assert replica.bodies == []
        writer.close()


async def test_a_client_that_leaves_ends_its_request_at_the_replica(run: Run) -> None:
    async with (
        scripted_replica(run, "a", stream_of(EVENT, EVENT, go_on=asyncio.Event()), version=3) as replica,
        gateway(run) as http,
    ):
        async with http.stream("POST", "/v1/completions", json=STREAM) as reply:
            assert reply.status_code == 200
        await asyncio.wait_for(replica.left.wait(), 300)
        await until(lambda: shows(http, IDLE))
        assert len(replica.bodies) == 1


async def test_a_lost_redis_changes_nothing(
    run: Run, redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = asyncio.Event()

    async def lost(registry: Registry, kind: str) -> list[object]:
        looked.set()
        raise StoreError("Redis", "none", "Start it.")

    async with scripted_replica(run, "a", reply_with(BODY), version=3), gateway(run) as http:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(Registry, "leases", lost)
            looked.clear()
            await asyncio.wait_for(looked.wait(), 300)
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        assert "stay in use" in caplog.text
