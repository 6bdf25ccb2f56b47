"""A replica that shares its devices with a learner: requests and swaps while the learner has them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest

from polyreme.api.v1 import rollout_pb2_grpc
from polyreme.errors import StoreError
from polyreme.experience.device_lease import DeviceLease
from polyreme.experience.run import Run
from polyreme.experience.scripts import Scripts, StaleGrantError
from polyreme.net import rpc
from polyreme_rollout.devices.device_turns import ReplicaTurns
from polyreme_rollout.engine.protocol import Slept
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from support.replicas import Answer, generate, request
from support.simulated import IdleLearner, Replica, idle_learner, simulated_replica
from support.waiting import DEADLINE, until

TTL = 1000.0


class SteppedEngine(SimulatedInferenceEngine):
    """Samples a chunk, and wakes, only when the test allows it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.chunks, self.may_wake = asyncio.Semaphore(0), asyncio.Event()
        self.may_wake.set()
        self.paused, self.resumed, self.wakes = False, 0, 0
        self.slept = Slept(0, weights=True, cache=True)

    def allow(self, chunks: int) -> None:
        for _ in range(chunks):
            self.chunks.release()

    async def _spend(self, tokens: int) -> None:
        await self.chunks.acquire()
        await super()._spend(tokens)

    async def pause(self) -> None:
        await super().pause()
        self.paused = True

    async def resume(self) -> None:
        await super().resume()
        self.paused, self.resumed = False, self.resumed + 1

    async def sleep(self) -> Slept:
        await super().sleep()
        return self.slept

    async def wake(self) -> None:
        self.wakes += 1
        await self.may_wake.wait()
        await super().wake()


class Shared:
    """A replica at version 0 that takes turns, its learner, and both sides of the lease."""

    def __init__(self, replica: Replica, learner: IdleLearner, run: Run, generate: DeviceLease) -> None:
        assert isinstance(replica.engine, SteppedEngine)
        self.replica, self.learner, self.engine, self.generate = replica, learner, replica.engine, generate
        self.train = DeviceLease(run, "train", "l", TTL)

    async def ask(self, max_new: int) -> Answer:
        async with rpc.connect(self.replica.lease.address, None) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            asked = request(self.replica.swapper.staging._run_id, [5, 6, 7], [(0, [], max_new, 1)], 0)
            return (await generate(stub, asked))[0]

    def steps_aside(self) -> float | None:
        return self.metric("device_seconds_count", step="sleep")

    def metric(self, name: str, **labels: str) -> float | None:
        return self.replica.metrics.registry.get_sample_value(f"polyreme_rollout_{name}", labels)


@asynccontextmanager
async def shared(run: Run) -> AsyncIterator[Shared]:
    async with AsyncExitStack() as stack:
        lease = DeviceLease(Run(run.redis, run.run_id), "generate", "r", TTL)
        await lease.acquire()
        starting = simulated_replica(run, "r", engine_type=SteppedEngine, may_use_devices=lambda: lease.usable)
        replica = await stack.enter_async_context(starting)
        both = Shared(replica, await stack.enter_async_context(idle_learner(run, [replica])), run, lease)
        parts = lease, replica.engine, replica.swapper, replica.running, replica.metrics
        turns = ReplicaTurns(*parts, on_change=partial(asyncio.sleep, 0), retry_seconds=0.01)
        task = asyncio.create_task(turns.take_turns())
        try:
            yield both
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task  # raises its error


def versions(answer: Answer) -> list[int]:
    return [version for version, _, _ in answer.spans]


@pytest.mark.parametrize(
    ("slept", "recomputed"), [(Slept(0, weights=True, cache=True), 0), (Slept(7, weights=False, cache=False), 1)]
)
async def test_a_running_sequence_waits_and_goes_on(run: Run, slept: Slept, recomputed: int) -> None:
    async with shared(run) as both:
        both.engine.slept = slept
        answering = asyncio.create_task(both.ask(200))
        both.engine.allow(2)
        await until(lambda: both.engine.chunks.locked() and both.engine.tokens > 0)
        await both.train.acquire(DEADLINE)
        assert both.engine.paused
        sampled = both.engine.tokens
        both.engine.allow(100)
        for _ in range(10):
            await both.train.renew()
        assert both.engine.tokens == sampled < 200 and not answering.done()  # it has left the devices
        await both.train.give_up()
        answer = await asyncio.wait_for(answering, DEADLINE)
        assert len(answer.ids) == 200 and set(versions(answer)) == {0}
        assert both.metric("device_freed_bytes") == slept.freed
        assert both.metric("recomputed_sequences_total") == recomputed
        assert both.steps_aside() == both.metric("device_seconds_count", step="wake") == 1


async def test_a_call_waits_for_the_devices(run: Run) -> None:
    async with shared(run) as both:
        await both.train.acquire(DEADLINE)
        both.engine.allow(100)
        asking = asyncio.create_task(both.ask(8))
        await until(lambda: len(both.replica.calls) == 1)
        assert both.engine.paused and not asking.done()
        await both.train.give_up()
        assert versions(await asyncio.wait_for(asking, DEADLINE)) == [0]
        assert both.steps_aside() == 1


async def test_a_push_waits_for_the_devices(run: Run) -> None:
    async with shared(run) as both:
        await both.train.acquire(DEADLINE)
        await both.learner.write(1)
        pushing = asyncio.create_task(both.learner.push(both.replica))
        await until(lambda: both.replica.swapper.staging._staged._id is not None)
        assert both.engine.paused and not pushing.done() and both.replica.swapper.version == 0
        await both.train.give_up()
        await asyncio.wait_for(pushing, DEADLINE)
        assert both.replica.swapper.version == 1
        both.engine.allow(100)
        assert versions(await asyncio.wait_for(both.ask(8), DEADLINE)) == [1]


async def test_a_version_that_was_announced_is_awaited_before_sampling_continues(run: Run) -> None:
    async with shared(run) as both:
        await both.train.acquire(DEADLINE)
        await run.redis.hset(run.key("meta"), "version", "1")  # as `set_version` after a plan
        await both.learner.write(1)
        both.engine.allow(100)
        asking = asyncio.create_task(both.ask(8))
        await until(lambda: len(both.replica.calls) == 1)
        await both.train.give_up()
        await both.learner.push(both.replica)
        assert versions(await asyncio.wait_for(asking, DEADLINE)) == [1]


class Outage(Scripts):
    """A Redis that does not answer a replica's next two claims of the devices."""

    failures = 2

    async def call(self, name: str, *arguments: Any, **keys: Any) -> Any:
        if (name, *arguments[:2], arguments[3]) == ("device", "ask", "generate", 0) and self.failures:
            self.failures -= 1
            raise StoreError("an answer of Redis", "none", "Start it again.")
        return await super().call(name, *arguments, **keys)


async def test_a_replica_outlives_an_outage_of_redis_between_two_turns(run: Run) -> None:
    async with shared(run) as both:
        both.generate._run.scripts = outage = Outage(run.redis, run.run_id)  # before its first claim, so that both are lost
        await both.train.acquire(DEADLINE)
        await until(lambda: outage.failures == 0)
        assert both.engine.paused and not both.generate.usable
        await both.train.give_up()
        both.engine.allow(100)
        assert len((await asyncio.wait_for(both.ask(8), DEADLINE)).ids) == 8


async def test_a_replica_whose_grant_ends_while_it_wakes_samples_nothing_and_steps_aside_again(run: Run) -> None:
    async with shared(run) as both:
        await both.train.acquire(DEADLINE)
        both.engine.allow(100)
        asking = asyncio.create_task(both.ask(8))
        both.engine.may_wake.clear()
        await both.train.give_up()
        await until(lambda: both.engine.wakes == 1)
        await run.redis.hdel(run.key("device"), "generate:r")  # as if it had been stopped until its grant ended
        await both.train.acquire(DEADLINE)
        with pytest.raises(StaleGrantError):
            await both.generate.renew()
        resumed = both.engine.resumed
        both.engine.may_wake.set()
        await until(lambda: both.steps_aside() == 2)
        assert both.engine.resumed == resumed and both.engine.tokens == 0 and not asking.done()
        await both.train.give_up()
        assert len((await asyncio.wait_for(asking, DEADLINE)).ids) == 8
