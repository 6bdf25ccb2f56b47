"""The calls of Generate that share a stream to a replica."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.net import rpc
from polyreme.net.call_stream import TOLD_BYTES
from polyreme.net.many_calls import NumberedCall
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.replicas.claim import ReplicaCalls, replica_calls
from support.generation_world import generation_world
from support.replicas import request
from support.simulated import Replica
from support.waiting import until

Call = NumberedCall[pb.GenerateRequest, pb.GenerateResponse]
ENDLESS = {"step_seconds": 0.01, "lengths": Lengths(1e9)}


@pytest_asyncio.fixture
async def replica(redis: Redis, run_id: str, tmp_path: Path) -> AsyncIterator[Replica]:
    async with generation_world(redis, run_id, tmp_path) as world:
        yield (await world.start(ENDLESS))[0]


@pytest_asyncio.fixture
async def calls(replica: Replica) -> AsyncIterator[ReplicaCalls]:
    calls = replica_calls(rpc.connect(replica.lease.address))
    yield calls
    await calls.close()


def asked(run_id: str, max_new: int) -> pb.GenerateRequest:
    return request(run_id, [5, 6, 7], [(0, [], max_new, 0)], temperature=1.0)


async def tokens(call: Call) -> int:
    return sum([len(chunk.token_ids) // 4 async for response in call for chunk in response.chunks])


async def code(call: "asyncio.Task[int]") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await asyncio.wait_for(call, 300)
    return found.value.code()


async def test_a_call_is_cancelled_alone(replica: Replica, calls: ReplicaCalls, run_id: str) -> None:
    short, first, second = (calls.begin(asked(run_id, max_new)) for max_new in (24, 200, 200))
    await until(lambda: len(replica.running) == 3)
    first.cancel()
    await until(lambda: len(replica.running) == 2)
    assert await asyncio.wait_for(tokens(short), 300) == 24
    second.cancel()
    await asyncio.wait_for(replica.running.drained(), 300)
    short.cancel()  # ended: nothing happens
    assert await asyncio.wait_for(tokens(calls.begin(asked(run_id, 8))), 300) == 8


async def test_a_call_that_is_cancelled_before_it_is_sent_never_begins(
    replica: Replica, calls: ReplicaCalls, run_id: str
) -> None:
    calls.begin(asked(run_id, 8)).cancel()
    assert await asyncio.wait_for(tokens(calls.begin(asked(run_id, 8))), 300) == 8
    assert len(replica.calls) == 1


async def test_requests_that_are_large_together_are_several_messages(replica: Replica, calls: ReplicaCalls, run_id: str) -> None:
    large = request(run_id, [5] * (TOLD_BYTES // 2), [(0, [], 8, 0)], temperature=1.0)
    found = [asyncio.create_task(tokens(calls.begin(each))) for each in (*[large] * 20, asked(run_id, 8))]
    assert {await code(call) for call in found[:-1]} == {grpc.StatusCode.INVALID_ARGUMENT}  # beyond the model's context
    assert await asyncio.wait_for(found[-1], 300) == 8


async def test_the_end_of_a_stream_ends_its_calls(replica: Replica, calls: ReplicaCalls, run_id: str) -> None:
    running = [asyncio.create_task(tokens(calls.begin(asked(run_id, 200)))) for _ in range(3)]
    await until(lambda: len(replica.running) == 3)
    await replica.die()
    assert [await code(call) for call in running] == [grpc.StatusCode.UNAVAILABLE] * 3
    assert await code(asyncio.create_task(tokens(calls.begin(asked(run_id, 8))))) is grpc.StatusCode.UNAVAILABLE


async def test_a_replica_that_drains_ends_its_calls_first(replica: Replica, calls: ReplicaCalls, run_id: str) -> None:
    running = asyncio.create_task(tokens(calls.begin(asked(run_id, 40))))
    await until(lambda: len(replica.running) == 1)
    replica.service.drain()
    late = asyncio.create_task(tokens(calls.begin(asked(run_id, 8))))
    assert await code(late) is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(running, 300) == 40
    assert await code(asyncio.create_task(tokens(calls.begin(asked(run_id, 8))))) is grpc.StatusCode.UNAVAILABLE


async def test_calls_end_when_they_are_closed(replica: Replica, calls: ReplicaCalls, run_id: str) -> None:
    running = asyncio.create_task(tokens(calls.begin(asked(run_id, 200))))
    await until(lambda: len(replica.running) == 1)
    await calls.close()
    assert await code(running) is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(replica.running.drained(), 300)
