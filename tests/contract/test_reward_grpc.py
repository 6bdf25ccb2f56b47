"""RewardService behaves as its proto specifies."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from polyreme.api.v1 import reward_pb2
from polyreme.net import rpc
from support.rewards import EXACT, serving


def request(*responses: str, label: str = "3", keys: bool = False) -> reward_pb2.ScoreRequest:
    items = [
        reward_pb2.ScoreItem(key=f"key-{n}-{text}" if keys else "", prompt="p", response=text, label=label)
        for n, text in enumerate(responses)
    ]
    return reward_pb2.ScoreRequest(run_id="run", items=items)


async def test_scores_come_in_order_with_their_parts() -> None:
    async with serving({**EXACT, "weight": 2.0}, {"name": "numeric", "weight": 0.5}) as (stub, _, _):
        reply = await stub.Score(request("#3", "3", "#4", keys=True), timeout=300)
        assert [result.key for result in reply.results] == ["key-0-#3", "key-1-3", "key-2-#4"]
        assert [result.score for result in reply.results] == [2.5, 0.5, 0.0]
        assert {result.status for result in reply.results} == {reward_pb2.SCORE_STATUS_OK}
        exact, numeric = reply.results[0].parts
        assert (exact.name, exact.raw, exact.weighted) == ("exact", 1.0, 2.0)
        assert (numeric.name, numeric.raw, numeric.weighted) == ("numeric", 1.0, 0.5)
        listed = await stub.ListRewards(reward_pb2.ListRewardsRequest(), timeout=300)
        assert listed.api == 1
        assert [(info.name, info.weight, info.version, info.correctness) for info in listed.rewards] == [
            ("exact", 2.0, exact.plugin_version, True),
            ("numeric", 0.5, numeric.plugin_version, True),
        ]


async def test_a_failure_is_a_status_and_its_other_parts_are_still_returned() -> None:
    async with serving(EXACT, {"name": "numeric"}) as (stub, _, _):
        (result,) = (await stub.Score(request("#three", label="three"), timeout=300)).results
        assert result.status == reward_pb2.SCORE_STATUS_ERROR
        assert (result.score, [part.name for part in result.parts]) == (0.0, ["exact"])
        assert result.message.startswith("numeric: expected one number in the label")


@pytest.mark.parametrize("count", [0, 4097])
async def test_an_empty_or_oversized_batch_is_an_invalid_argument(count: int) -> None:
    async with serving(EXACT) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(request(*["#3"] * count), timeout=300)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_come_back(tmp_path) -> None:
    plugin, gate = tmp_path / "gated.py", tmp_path / "gate"
    plugin.write_text(
        "import pathlib, time\n"
        f"def reward(response):\n    while not pathlib.Path({str(gate)!r}).exists():\n        time.sleep(0.01)\n    return 1.0\n"
    )
    async with serving({"file": str(plugin)}, queue=4) as (stub, client, _):
        calls = [asyncio.ensure_future(stub.Score(request("a", "b"), timeout=300)) for _ in range(3)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        refused = [call for call in calls if call.done()]
        assert len(refused) == 1
        error = refused[0].exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) >= 100
        answer = await client.post("/v1/score", json={"items": [{"response": "a"}] * 4})
        assert (answer.status_code, int(answer.headers["retry-after"]) >= 1) == (429, True)
        gate.touch()
        for call in calls:
            if call is not refused[0]:
                assert [r.score for r in (await call).results] == [1.0, 1.0]
        assert [r.score for r in (await stub.Score(request("a"), timeout=300)).results] == [1.0]


async def test_callers_that_give_up_and_ask_again_have_every_key_scored_once(tmp_path: Path) -> None:
    """Random calls with the same keys, on both wires, many of them cancelled: no item is scored twice, and none is lost."""
    plugin = tmp_path / "noted.py"
    plugin.write_text(
        "import time\n"
        "def reward(response, metadata):\n"
        f"    with open({str(tmp_path / 'seen')!r}, 'a') as seen: seen.write(response + '\\n')\n"
        "    time.sleep(0.002)\n"
        "    return int(response) / 2\n"
    )
    rng = random.Random(0)
    async with serving({"file": str(plugin)}, workers=2) as (stub, client, _):

        async def by_grpc(numbers: list[int]) -> list[float]:
            items = [reward_pb2.ScoreItem(key=f"k{n}", response=str(n)) for n in numbers]
            return [r.score for r in (await stub.Score(reward_pb2.ScoreRequest(items=items), timeout=300)).results]

        async def by_http(numbers: list[int]) -> list[float]:
            reply = await client.post("/v1/score", json={"items": [{"key": f"k{n}", "response": str(n)} for n in numbers]})
            return [result["score"] for result in reply.json()["results"]]

        async def caller() -> None:
            numbers = [rng.randrange(300) for _ in range(rng.randint(1, 40))]
            ask = rng.choice([by_grpc, by_http])
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.choice([0.005, 0.05])):
                    await ask(numbers)
            assert await ask(numbers) == [n / 2 for n in numbers]

        await asyncio.gather(*(caller() for _ in range(60)))
        assert "polyreme_reward_items_inside 0.0" in (await client.get("/metrics")).text
    seen = (tmp_path / "seen").read_text().split()
    assert len(seen) == len(set(seen)) > 250


async def test_health_goes_with_the_service() -> None:
    async with serving(EXACT) as (_, client, addresses):
        async with rpc.connect(addresses.grpc) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            for name in ("", "polyreme.api.v1.RewardService"):
                reply = await check(health_pb2.HealthCheckRequest(service=name), timeout=300)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"ready": True}
        await client.post("/v1/score", json={"items": [{"response": "#3", "label": "3"}, {"response": "#3"}]})
        metrics = (await client.get("/metrics")).text
        assert 'polyreme_reward_outcomes_total{reward="exact",status="ok"} 1.0' in metrics
        assert 'polyreme_reward_outcomes_total{reward="exact",status="error"} 1.0' in metrics


@pytest.mark.parametrize(
    "junk", [b"", b"\x00" * 100, b"\xff" * 100, b"\x12\x04\x0a\x02\xff\xfe", bytes(range(256)) * 40], ids=range(5)
)
async def test_bytes_that_are_no_message_do_no_harm(junk: bytes) -> None:
    async with serving(EXACT) as (stub, _, addresses):
        async with rpc.connect(addresses.grpc) as channel:
            call = channel.unary_unary("/polyreme.api.v1.RewardService/Score")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(junk, timeout=300)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await stub.Score(request("#3"), timeout=300)).results[0].score == 1.0
