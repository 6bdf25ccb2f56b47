"""The native HTTP wire, also from one of our servers to another, and its limits."""

import asyncio
import socket

from polyreme.net.http_server import BODY_LIMIT
from support.rewards import EXACT, item, scoring, serving


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
        assert (listed["api"], [r["name"] for r in listed["rewards"]]) == (1, ["exact"])
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


async def test_a_body_beyond_the_limit_is_a_413() -> None:
    async with serving(EXACT) as (_, client, _):
        announced = await client.post("/v1/score", content=b"x" * (BODY_LIMIT + 1))
        assert (announced.status_code, announced.json()) == (413, {"detail": f"expected a body of at most {BODY_LIMIT} bytes"})

        async def pieces():  # chunked, without a length
            for _ in range(BODY_LIMIT // (1 << 20) + 1):
                yield b" " * (1 << 20)

        assert (await client.post("/v1/score", content=pieces())).status_code == 413
        assert (await client.get("/health")).status_code == 200


async def test_what_json_cannot_hold_is_a_422() -> None:
    async with serving(EXACT) as (_, client, _):
        for body in (
            b'{"items":[{"response":NaN}]}',
            b'{"items":[{"response":1e999}]}',
            b"{",
        ):
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
        assert b"400" in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert (await client.get("/health")).status_code == 200
        silent.close()
