"""A replica that shares its devices with a learner: what runs, waits and swaps while the learner has them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from polyreme.api.v1 import rollout_pb2_grpc
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme_rollout.device_turns import ReplicaTurns
from support.replicas import Answer, generate, request
from support.simulated import IdleLearner, Replica, idle_learner, simulated_replica
from support.waiting import until

TTL = 1000.0


@asynccontextmanager
async def shared(run: Run) -> AsyncIterator[tuple[Replica, IdleLearner, DeviceLease]]:
    """A replica at version 0 that takes turns, its learner, and the learner's side of the lease."""
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(simulated_replica(run, "r", step_seconds=0.001))
        learner = await stack.enter_async_context(idle_learner(run, [replica]))
        device = DeviceLease(run, "generate", "r", TTL)
        await device.acquire()
        turns = ReplicaTurns(device, replica.engine, replica.swapper, replica.service, replica.metrics)
        task = asyncio.create_task(turns.follow())
        yield replica, learner, DeviceLease(run, "train", "l", TTL)
        assert not task.done()
        task.cancel()


async def ask(replica: Replica, max_new: int, min_version: int = 0) -> Answer:
    async with rpc.connect(replica.lease.address, None) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        asked = request(replica.swapper._run_id, [5, 6, 7], [(0, [], max_new, 1)], min_version)
        return (await generate(stub, asked))[0]


async def test_a_running_sequence_waits_and_goes_on(run: Run) -> None:
    async with shared(run) as (replica, _, train):
        answering = asyncio.create_task(ask(replica, 200))
        await until(lambda: replica.engine.tokens >= 32)
        await train.acquire(within=60)
        sampled = replica.engine.tokens
        assert 0 < sampled < 200 and not answering.done()
        await asyncio.sleep(0.05)
        assert replica.engine.tokens == sampled  # it has left the devices
        await train.give_up()
        answer = await asyncio.wait_for(answering, 60)
        assert len(answer.ids) == 200
        assert [version for version, _, _ in answer.spans] == [0]


async def test_a_push_and_a_call_wait_for_the_devices(run: Run) -> None:
    async with shared(run) as (replica, learner, train):
        await train.acquire(within=60)
        await learner.write(1)
        pushing, asking = asyncio.create_task(learner.push(replica)), asyncio.create_task(ask(replica, 8))
        await until(lambda: len(replica.calls) == 1)
        await asyncio.sleep(0.05)
        assert not pushing.done() and not asking.done() and replica.swapper.version == 0
        await train.give_up()
        await asyncio.wait_for(pushing, 60)
        answer = await asyncio.wait_for(asking, 60)
        assert replica.swapper.version == 1
        assert [version for version, _, _ in answer.spans] in ([0], [1])
        assert metric(replica, "polyreme_rollout_device_seconds_count", step="sleep") == 1


async def test_a_version_that_was_announced_is_awaited_before_sampling_continues(run: Run) -> None:
    async with shared(run) as (replica, learner, train):
        await train.acquire(within=60)
        await run.redis.hset(run.key("meta"), "version", "1")  # as `set_version` after a plan
        await learner.write(1)
        asking = asyncio.create_task(ask(replica, 8))
        await until(lambda: len(replica.calls) == 1)
        await train.give_up()
        await learner.push(replica)
        answer = await asyncio.wait_for(asking, 60)
        assert [version for version, _, _ in answer.spans] == [1]


def metric(replica: Replica, name: str, **labels: Any) -> float | None:
    return replica.metrics.registry.get_sample_value(name, labels)
