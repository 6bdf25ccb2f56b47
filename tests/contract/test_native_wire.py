"""The native HTTP wire, also from one of our servers to another, and its limits."""

import asyncio
import socket
import threading
from pathlib import Path

import httpx
import pytest

from polyreme.api.v1 import reward_pb2, reward_pb2_grpc
from polyreme.errors import ConfigError
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.net.http_server import BODY_LIMIT
from polyreme_reward.items import Item
from polyreme_reward.server import serve
from support.ipv6 import needs_ipv6
from support.rewards import EXACT, item, reward_config, scoring, serving, summary


async def test_every_item_has_a_status_and_a_failure_no_number() -> None:
    async with serving(EXACT) as (_, client, _):
        items = [{"key": "a", "response": "#3", "label": "3"}, {"key": "b", "response": "#3"}]
        good, bad = (await client.post("/v1/score", json={"items": items})).json()["results"]
        assert (good["key"], good["status"], good["score"], good["message"]) == ("a", "ok", 1.0, "")
        assert {k: good["parts"][0][k] for k in ("name", "raw", "weighted")} == {"name": "exact", "raw": 1.0, "weighted": 1.0}
        assert (bad["key"], bad["status"], bad["score"], bad["parts"]) == ("b", "error", None, [])
        assert "label" in bad["message"]


async def test_its_rewards_and_its_documentation() -> None:
    async with serving(EXACT) as (_, client, _):
        listed = (await client.get("/v1/rewards")).json()
        assert (listed["api"], [(r["name"], r["correctness"]) for r in listed["rewards"]]) == (1, [("exact", True)])
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert {"/", "/get_reward", "/v1/score", "/v1/rewards", "/health", "/ready", "/metrics"} <= paths.keys()
        assert (await client.get("/docs")).status_code == 200


async def test_one_server_behind_another() -> None:
    async with serving(EXACT, {"name": "length"}) as (_, _, inner):
        reward = {"name": "inner", "url": f"http://{inner.http}/v1/score", "protocol": "native", "options": {"batch": 8}}
        async with scoring(reward) as scorer:
            good, bad = await scorer.score([item("x #3"), item("x #3", "")])
            assert good.score == 3.0
            assert [p.name for p in good.parts] == ["inner", "inner/exact", "inner/length"]
            assert (bad.status.name, "label" in bad.message) == ("ERROR", True)


async def test_rows_may_choose_their_rewards() -> None:
    async with scoring(EXACT, {"name": "length", "weight": 0.5}, choose_by="task") as scorer:
        tasks = ['{"task": "exact"}', '{"task": ["length", "exact"]}', '{"task": "lenth"}', "{}", '{"task": "length"}']
        answers = await scorer.score([item("a #3", metadata_json=task) for task in tasks])
        assert [(a.status.name, a.score, [p.name for p in a.parts]) for a in answers] == [
            ("OK", 1.0, ["exact"]),
            ("OK", 2.0, ["exact", "length"]),
            ("ERROR", 0.0, []),
            ("ERROR", 0.0, []),
            ("OK", 1.0, ["length"]),
        ]
        assert "'lenth'" not in answers[3].message and "lenth" in answers[2].message


async def test_choices_name_the_reward_of_a_value() -> None:
    choices = {"openai/gsm8k": "exact"}
    async with scoring(EXACT, {"name": "length", "weight": 0.5}, choose_by="data_source", choices=choices) as scorer:
        sources = ('{"data_source": "openai/gsm8k"}', '{"data_source": "length"}', '{"data_source": "other"}')
        answers = await scorer.score([item("a #3", metadata_json=source) for source in sources])
    assert [[part.name for part in answer.parts] for answer in answers] == [["exact"], ["length"], []]


TOO_LARGE = f"expected a body of at most {BODY_LIMIT} bytes; found more. Send less in one request."


async def test_a_body_beyond_the_limit_is_a_413_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(EXACT) as (_, client, _):
        announced = await client.post("/v1/score", content=b"x" * (BODY_LIMIT + 1))
        assert (announced.status_code, announced.json()) == (413, {"detail": TOO_LARGE})

        async def pieces():  # chunked, without a length
            for _ in range(BODY_LIMIT // (1 << 20) + 1):
                yield b" " * (1 << 20)

        assert (await client.post("/v1/score", content=pieces())).status_code == 413
        assert (await client.get("/health")).status_code == 200
    logged = [record.getMessage() for record in caplog.records if record.name == "polyreme.net.http_server"]
    assert len(logged) == 2 and all("/v1/score" in line and str(BODY_LIMIT) in line for line in logged)


async def test_a_page_that_reaches_it_through_a_browser_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    body = {"items": [{"response": "#3", "label": "3"}]}
    async with serving(EXACT) as (_, client, _):
        for headers, expected in (({"host": "evil.example"}, 421), ({"origin": "https://evil.example"}, 403), ({}, 200)):
            assert (await client.post("/v1/score", json=body, headers=headers)).status_code == expected
        for path in ("/ready", "/metrics", "/docs", "/openapi.json"):
            answer = await client.get(path, headers={"host": "evil.example:80"})
            assert (answer.status_code, "POLYREME_HOSTS" in answer.json()["detail"]) == (421, True)
            assert (await client.get(path, headers={"host": "localhost:1"})).status_code == 200
    assert sum("evil.example" in record.getMessage() for record in caplog.records) == 1


async def test_a_service_has_the_names_that_it_was_started_for() -> None:
    endpoint = Endpoint(advertise="scores.example:50051")
    async with serve(reward_config(EXACT), endpoint) as addresses, httpx.AsyncClient(trust_env=False) as client:
        port = addresses.http.rpartition(":")[2]
        for host, expected in (("scores.example", 200), ("scores.example:8080", 200), ("10.9.8.7", 200), ("example", 421)):
            answer = await client.get(f"http://127.0.0.1:{port}/health", headers={"host": host})
            assert answer.status_code == expected


async def test_what_json_cannot_hold_is_a_422() -> None:
    async with serving(EXACT) as (_, client, _):
        for body in (b'{"items":[{"response":NaN}]}', b'{"items":[{"response":1e999}]}', b"{"):
            answer = await client.post("/v1/score", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 422, answer.text
        assert (await client.post("/v1/score", json={"items": []})).status_code == 422


async def test_lone_surrogates_are_text_like_any_other() -> None:
    async with serving(EXACT) as (_, client, _):
        odd = '"a\\ud800"'
        bodies = {
            "/": f'{{"src":[{odd}],"tgt":[{odd}],"response":["#a\\ud800"]}}',
            "/get_reward": f'{{"query":["#a\\ud800"],"labels":[{odd}]}}',
            "/v1/score": f'{{"items":[{{"key":{odd},"response":"#a\\ud800","label":{odd},"metadata":{{{odd}:{odd}}}}}]}}',
        }
        for path, body in bodies.items():
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200, (path, answer.text)
            assert "1.0" in answer.text


async def test_connections_that_say_nothing_or_nonsense_do_no_harm() -> None:
    async with serving(EXACT) as (_, client, addresses):
        host, port = addresses.http.split(":")
        silent = socket.create_connection((host, int(port)))
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01\x00\xff nonsense\r\n\r\n")
        assert b"400" in await asyncio.wait_for(reader.readline(), 300)
        writer.close()
        assert (await client.get("/health")).status_code == 200
        silent.close()


async def test_the_service_answers_while_long_texts_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(item: Item) -> float:
        loop.call_soon_threadsafe(begun.set)
        assert may_end.wait(300), "the service did not answer meanwhile"
        return 1.0

    monkeypatch.setattr("polyreme_reward.build.make_rule", lambda name, options: slow)
    async with serving({"name": "numeric"}) as (_, client, _):
        items = [{"response": "x" * 1_000_000, "label": "3"}] * 20
        scoring = asyncio.ensure_future(client.post("/v1/score", json={"items": items}, timeout=300))
        try:
            await asyncio.wait_for(begun.wait(), 300)
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert not scoring.done()
        finally:
            may_end.set()
        assert [result["score"] for result in (await scoring).json()["results"]] == [1.0] * 20


async def test_both_prompts_travel_over_both_wires(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def reward(prompt, templated_prompt):\n    return (prompt, templated_prompt) == ('p', '<user>p')\n"
    )
    async with serving({"file": str(tmp_path / "r.py")}) as (stub, client, _):
        texts = {"prompt": "p", "templated_prompt": "<user>p", "response": "r"}
        by_http = (await client.post("/v1/score", json={"items": [texts]})).json()["results"]
        request = reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(**texts)])
        by_grpc = (await stub.Score(request, timeout=300)).results
        assert (by_http[0]["score"], by_grpc[0].score) == (1.0, 1.0)


@needs_ipv6
async def test_both_ports_are_served_on_ipv6() -> None:
    async with (
        serve(reward_config(EXACT), Endpoint("::1")) as addresses,
        rpc.connect(addresses.grpc) as channel,
        httpx.AsyncClient(trust_env=False, timeout=300) as client,
    ):
        assert addresses.grpc.startswith("[::1]:") and addresses.url.startswith("http://[::1]:")
        assert (await client.get(f"{addresses.url}health")).status_code == 200
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        asked = reward_pb2.ScoreItem(response="#3", label="3")
        assert (await stub.Score(reward_pb2.ScoreRequest(items=[asked]), timeout=300)).results[0].score == 1.0
        far = {"name": "far", "url": f"{addresses.url}v1/score", "protocol": "native"}
        async with scoring(far) as scorer:
            assert summary(await scorer.score([item("#3")])) == [("OK", 1.0)]


@needs_ipv6
async def test_a_taken_port_of_ipv6_is_named() -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"a free port {port} on ::1"):
            async with serve(reward_config(EXACT), Endpoint("::1", port)):
                pass
