"""A gateway's forwarding, its choice of replicas, and its own responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from polyreme.experience.run import Run
from support.gateways import gateway, reply_with, scripted_replica, shows, stream_of
from support.waiting import until

BODY = b'{"id":"cmpl-1", "choices":[{"text":"\xc3\xa9","logprobs":{"token_logprobs":[-0.125]}}],"system_fingerprint":"policy-3"}'
EVENT = b'data: {"choices":[{"text":"%d"}],"system_fingerprint":"policy-3"}\n\n'
DONE = b"data: [DONE]\n\n"


def completion(model: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"prompt": "a", **({} if model is None else {"model": model}), **fields}


async def test_a_reply_passes_through_unchanged(run: Run) -> None:
    compact = json.dumps(json.loads(BODY), ensure_ascii=False, separators=(",", ":")).encode()  # in the form of every replica
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, gateway(run) as http:
        sent = b'{ "model": "default", "prompt": [5, 6],  "logprobs": 2, "return_token_ids": true }'
        sent = sent.replace(b"default", (await run.config()).name.encode())
        reply = await http.post(
            "/v1/completions", content=sent, headers={"x-request-id": "mine", "content-type": "application/json"}
        )
        assert (reply.status_code, reply.content) == (200, compact)
        assert replica.bodies == [sent]
        assert replica.headers[0]["x-request-id"] == b"mine"
        assert reply.headers["polyreme-policy-version"] == "3"
        assert reply.headers["polyreme-replica"] == replica.id
        assert reply.headers["x-request-id"] == "id-of-the-replica"


async def test_a_stream_passes_through_as_it_comes(run: Run) -> None:
    go_on = asyncio.Event()
    first, second = EVENT % 1, EVENT % 2
    answer = stream_of(first + second[:9], second[9:] + DONE, go_on=go_on)
    async with scripted_replica(run, "a", answer, version=3) as replica, gateway(run) as http:
        async with http.stream("POST", "/v1/chat/completions", json={"messages": [], "stream": True}) as reply:
            parts = reply.aiter_raw()
            assert await anext(parts) == first  # while the replica is still sending
            go_on.set()
            assert b"".join([part async for part in parts]) == second + DONE
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (reply.headers["polyreme-policy-version"], reply.headers["polyreme-replica"]) == ("3", replica.id)


async def test_a_replica_that_refuses_the_version_of_a_header_leaves_the_request_to_another(run: Run) -> None:
    wanted = {"polyreme-min-policy-version": "3"}
    async with scripted_replica(run, "a", reply_with(BODY), version=2) as behind, gateway(run) as http:
        refused = await http.post("/v1/completions", json=completion(), headers=wanted)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_answer")
        assert not behind.bodies
        async with scripted_replica(run, "b", reply_with(BODY), version=3) as replica:
            reply = await http.post("/v1/completions", json=completion("latest"), headers=wanted)
            async with asyncio.timeout(300):
                while reply.status_code == 503:  # the gateway does not know the new replica yet
                    await asyncio.sleep(0.02)
                    reply = await http.post("/v1/completions", json=completion("latest"), headers=wanted)
            assert (reply.status_code, reply.headers["polyreme-replica"]) == (200, replica.id)


async def test_the_version_of_a_header_takes_part_in_the_choice(run: Run) -> None:
    async with AsyncExitStack() as replicas:
        behind = [
            await replicas.enter_async_context(scripted_replica(run, f"a{i}", reply_with(BODY), version=2)) for i in range(4)
        ]
        ahead = await replicas.enter_async_context(scripted_replica(run, "b", reply_with(BODY), version=3, load=99))
        http = await replicas.enter_async_context(gateway(run))
        for name in ("min", "exact"):
            reply = await http.post("/v1/completions", json=completion(), headers={f"polyreme-{name}-policy-version": "3"})
            assert (reply.status_code, reply.headers["polyreme-replica"]) == (200, ahead.id)
        assert "polyreme_gateway_retries_total 0.0" in (await http.get("/metrics")).text
        assert not any(each.bodies for each in behind)
        wrong = await http.post("/v1/completions", json=completion(), headers={"polyreme-min-policy-version": "x"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_header")


@pytest.mark.parametrize("by_name", [False, True])
async def test_replicas_that_have_just_swapped_cost_no_attempt(run: Run, by_name: bool) -> None:
    wanted = completion(f"{(await run.config()).name}@3" if by_name else None)
    async with AsyncExitStack() as replicas:
        moved = [
            await replicas.enter_async_context(scripted_replica(run, f"a{i}", reply_with(BODY), version=3)) for i in range(4)
        ]
        last = await replicas.enter_async_context(scripted_replica(run, "b", reply_with(BODY), version=3, load=99))
        http = await replicas.enter_async_context(gateway(run, poll_interval=3600.0))  # it does not notice the swaps
        for each in moved:
            each.report(4)
        reply = await http.post("/v1/completions", json=wanted, headers={} if by_name else {"polyreme-exact-policy-version": "3"})
        assert (reply.status_code, reply.headers["polyreme-replica"]) == (200, last.id)
        assert not any(each.bodies for each in moved)  # they refused before any generation


async def test_an_error_of_the_replica_is_the_clients(run: Run) -> None:
    error = b'{"error":{"message":"a prompt that is too long"}}'
    async with scripted_replica(run, "a", reply_with(error, status=400)) as replica, gateway(run) as http:
        reply = await http.post("/v1/completions", json=completion())
        assert (reply.status_code, reply.content, len(replica.bodies)) == (400, error, 1)


async def test_what_a_client_writes_passes_as_it_is(run: Run) -> None:
    body = json.dumps({"prompt": "é中😀", "model": "latest"}, ensure_ascii=False).encode()
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, gateway(run) as http:
        reply = await http.post("/v1/completions", content=body, headers=[(b"x-request-id", b"caf\xe9")])
        assert reply.status_code == 200, reply.content
        assert json.loads(replica.bodies[0])["prompt"] == "é中😀"
        assert len(replica.bodies[0]) <= len(body) + len((await run.config()).name)
        assert replica.headers[0]["x-request-id"] == b"caf\xe9"


async def test_half_of_a_character_is_refused_by_the_replica(run: Run) -> None:
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, gateway(run) as http:
        reply = await http.post("/v1/completions", content=b'{"prompt": "\\ud800", "model": "latest"}')
        assert (reply.status_code, reply.headers["polyreme-replica"], replica.bodies) == (400, replica.id, [])


async def test_spaces_behind_a_header_do_not_lose_the_replica(run: Run) -> None:
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, gateway(run) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: 7 \t\r\ncontent-length: 2\r\n\r\n{}")
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 300)
        assert replica.headers[0]["x-request-id"] == b"7"
        writer.close()


async def test_a_name_chooses_the_replica_and_is_the_models_own_there(run: Run) -> None:
    base = (await run.config()).name
    asked = {base: {"old", "new"}, "latest": {"new"}, f"{base}@3": {"old"}, "prod": {"old"}, "policy": {"old", "new"}}
    async with (
        scripted_replica(run, "old", reply_with(BODY), version=3) as old,
        scripted_replica(run, "new", reply_with(BODY), version=4, load=5) as new,
        gateway(run, ["prod=3", "policy"]) as http,
    ):
        for model, expected in asked.items():
            reply = await http.post("/v1/completions", json=completion(model, n=2))
            assert reply.headers["polyreme-replica"].partition("-")[0] in expected, model
        for body in old.bodies + new.bodies:
            assert json.loads(body) == {"prompt": "a", "n": 2, "model": base}


async def test_requests_go_to_the_replica_with_the_least_to_do(run: Run) -> None:
    go_on = asyncio.Event()
    slow = stream_of(EVENT % 1, DONE, go_on=go_on)
    async with (
        scripted_replica(run, "busy", reply_with(BODY), version=3, load=1) as busy,
        scripted_replica(run, "free", slow, version=3) as free,
        gateway(run) as http,
        http.stream("POST", "/v1/completions", json=completion(stream=True)) as first,
    ):
        assert first.headers["polyreme-replica"] == free.id
        second = await http.post("/v1/completions", json=completion())
        assert second.headers["polyreme-replica"] == busy.id  # each has one request, and this one was chosen least recently
        go_on.set()


async def test_replicas_come_go_and_change_their_version(run: Run) -> None:
    base = (await run.config()).name

    async def names() -> list[str]:
        return [model["id"] for model in (await http.get("/v1/models")).json()["data"]]

    async def lists(*versions: int) -> bool:
        return await names() == [base, "latest", *(f"{base}@{version}" for version in versions)]

    async with gateway(run) as http:
        assert await lists()
        assert (await http.get("/ready")).status_code == 503
        async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica:
            await until(lambda: lists(3))
            assert (await http.get("/ready")).status_code == 200
            async with scripted_replica(run, "b", reply_with(BODY), version=4):
                await until(lambda: lists(4, 3))
            await until(lambda: lists(3))
            replica.report(5)
            await until(lambda: lists(5))
            replica.report(None)
            await until(lambda: lists())
        assert (await http.get("/health")).status_code == 200


async def test_the_list_of_models(run: Run) -> None:
    base = (await run.config()).name
    async with (
        scripted_replica(run, "a", reply_with(BODY), version=3, max_model_len=128),
        scripted_replica(run, "b", reply_with(BODY), version=3, max_model_len=64),
        gateway(run, ["prod=17"]) as http,
    ):
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [each["id"] for each in listed["data"]] == [base, "latest", "prod", f"{base}@3"]
        assert {each["max_model_len"] for each in listed["data"]} == {64}
        one = await http.get(f"/v1/models/{base}@3")
        assert one.json() == listed["data"][-1]
        assert (await http.get(f"/v1/models/{base}@4")).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_body"),
        (b"[1]", 400, "invalid_body"),
        (b'{"model": 3}', 400, "invalid_body"),
        (b"[" * 5000, 400, "invalid_body"),
        (b'{"seed": %b}' % (b"1" * 5000), 400, "invalid_body"),
        (b'{"model": "MODEL@%b"}' % (b"1" * 5000), 404, "model_not_found"),
        (b'{"model": "MODEL@", "suffix": "\\ud800"}', 404, "model_not_found"),
        (b'{"model": "unknown"}', 404, "model_not_found"),
        (b'{"model": "old"}', 404, "model_not_found"),
    ],
)
async def test_a_request_without_a_replica_for_it(run: Run, body: bytes, status: int, code: str) -> None:
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, gateway(run, ["old=1"]) as http:
        reply = await http.post("/v1/completions", content=body.replace(b"MODEL", (await run.config()).name.encode()))
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert status == 400 or f"{(await run.config()).name}@3" in error["message"]
        assert replica.bodies == []


async def test_a_run_without_replicas_is_a_503_and_a_wrong_path_a_404(run: Run) -> None:
    async with gateway(run) as http:
        reply = await http.post("/v1/completions", json=completion())
        assert (reply.status_code, reply.json()["error"]["code"], reply.headers["retry-after"]) == (503, "no_replica", "1")
        for path in ("/v1/embeddings", "/nothing"):
            missing = await http.post(path, json={})
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_requests_beyond_the_bound_get_429(run: Run) -> None:
    go_on = asyncio.Event()
    async with scripted_replica(run, "a", stream_of(EVENT % 1, DONE, go_on=go_on), version=3), gateway(run, requests=1) as http:
        async with http.stream("POST", "/v1/completions", json=completion(stream=True)) as first:
            assert first.status_code == 200
            refused = await http.post("/v1/completions", json=completion())
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            go_on.set()
            assert [part async for part in first.aiter_raw()][-1].endswith(DONE)
        await until(lambda: shows(http, "polyreme_gateway_active_requests 0.0"))
        async with http.stream("POST", "/v1/completions", json=completion(stream=True)) as again:
            assert again.status_code == 200


async def test_a_body_that_is_still_read_counts(run: Run) -> None:
    go_on = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await go_on.wait()
        yield b'"a"}'

    async with scripted_replica(run, "a", reply_with(BODY), version=3), gateway(run, requests=1) as http:
        slow = asyncio.create_task(http.post("/v1/completions", content=pieces()))
        await until(lambda: shows(http, "polyreme_gateway_active_requests 1.0"))
        assert (await http.post("/v1/completions", json=completion())).status_code == 429
        go_on.set()
        assert (await slow).status_code == 200


async def test_an_error_of_the_gateway_has_the_format_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyreme.gateway.forward.parse", None)
    async with gateway(run) as http:
        reply = await http.post("/v1/completions", json=completion())
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")


async def test_a_body_beyond_the_limit_is_refused(run: Run) -> None:
    small = gateway(run, body_bytes=100)
    async with scripted_replica(run, "a", reply_with(BODY), version=3) as replica, small as http:
        refused = await http.post("/v1/completions", content=b"x" * 101)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        assert replica.bodies == []


async def test_metrics_count_requests_and_replicas(run: Run) -> None:
    async with scripted_replica(run, "a", reply_with(BODY), version=3), gateway(run) as http:
        await http.post("/v1/completions", json=completion())
        await http.post("/v1/completions", json=completion("unknown"))
        lines = (
            'polyreme_gateway_requests_total{status="200"} 1.0',
            'polyreme_gateway_requests_total{status="404"} 1.0',
            "polyreme_gateway_replicas 1.0",
            "polyreme_gateway_active_requests 0.0",
            "polyreme_gateway_retries_total 0.0",
        )
        await until(lambda: shows(http, *lines))
