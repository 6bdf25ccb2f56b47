"""Which version samples get: over simulated replicas with real gRPC, whose weights change while they generate."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from polyreme import API_VERSION
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import Writer
from polyreme.experience.log_reader import COMMITS_BOUND
from polyreme.weights.canary import Canary
from polyreme_rollout.testing.simulated_engine import Failures, Lengths, SimulatedInferenceEngine
from polyreme_trainer.orchestrator.generation.generate import generate
from polyreme_trainer.weight_sync.replica_client import SwapError
from support.generation_world import generation_world
from support.waiting import until


@pytest.fixture
async def world(redis, run_id, tmp_path):
    async with generation_world(redis, run_id, tmp_path) as world:
        yield world


async def test_spans_of_a_continuation_on_a_newer_version(world):
    slow = {"step_seconds": 0.005, "lengths": Lengths(1e9)}
    dying, other = await world.start({**slow, "failures": Failures(die_after=64)}, slow)
    await world.learner.write(1)
    await world.learner.push(other)
    (one,) = await world.generate(count=1)
    (_, _, change), _ = one.spans
    assert one.spans == [(0, 0, change), (1, change, 96)] and change in (48, 64)  # its last chunk may be lost with it
    assert len(dying.calls) == 1


async def test_tokens_of_a_version_that_a_resumed_learner_went_back_to_are_dropped(world):
    """A resumed learner makes replicas serve its checkpoint's version until it catches up. A newer group must not get such tokens."""
    (replica,) = await world.start({"step_seconds": 0.01, "lengths": Lengths(1e9)})

    async def serve(version):
        await world.learner.write(version)
        await world.learner.push(replica)
        await world.pool.refresh()

    await serve(1)
    generating = asyncio.create_task(
        generate(world.pool, world.wanted(min_version=1, count=2), chunk_timeout=60.0, progress_timeout=600.0)
    )
    await world.a_chunk_came()
    await replica.engine.pause()  # until it has the other version
    await world.learner.log.take(Writer.LEARNER)
    await serve(0)
    await until(lambda: bool(world.pool.waiting))  # for a replica that serves version 1
    await serve(1)
    for draft in await asyncio.wait_for(generating, 300):
        assert draft.length == 96 and draft.spans == [(1, 0, 96)]
    assert len(replica.calls) >= 2 and any(slot.prefix_ids for slot in replica.calls[-1].slots)


async def test_version_gating(world):
    old, new = await world.start({}, {})
    await world.learner.write(1)
    await world.learner.push(new)
    await world.pool.refresh()
    await world.generate(min_version=1)
    assert len(new.calls) == 1 and not old.calls


async def test_a_replica_behind_its_commit_is_not_asked_twice_in_a_row(world):
    """If the pool knows a commit that the replica has lost, for example by a restart, one call is refused, but the attempt continues."""
    behind, other = await world.start({}, {})
    await world.learner.log.ack_commit("r0", 5, 1, 0.0, 0.0)
    await world.learner.write(5)
    await world.learner.push(other)
    await world.pool.refresh()
    samples = await world.generate(min_version=5)
    assert all(one.finished for one in samples) and len(behind.calls) == 1 and len(other.calls) == 1


async def test_a_call_for_a_staged_version_waits_at_the_replica_for_its_commit(world):
    (replica,) = await world.start({"commit_seconds": 300.0})
    await world.learner.write(1)
    await world.learner.stage(replica)
    await world.pool.refresh()
    generating = asyncio.create_task(world.generate(min_version=1))
    await replica.asked.wait()
    await world.learner.push(replica)
    await world.pool.refresh()  # a refused call would be followed by another one
    for one in await asyncio.wait_for(generating, 300):
        assert one.finished and one.spans == [(1, 0, one.length)]
    assert len(replica.calls) == 1


async def test_a_staged_version_that_is_never_committed_costs_one_refused_call(world):
    behind, other = await world.start({"commit_seconds": 0.0}, {})
    await world.learner.write(1)
    await world.learner.push(other)
    await world.learner.stage(behind)
    await world.pool.refresh()
    reaching = asyncio.ensure_future(behind.swapper.reach(1))
    for _ in range(10):  # turns of the event loop
        await asyncio.sleep(0)
    assert reaching.done() and reaching.result() == 0
    samples = await world.generate(min_version=1)
    assert all(one.finished for one in samples)
    assert len(behind.calls) == 1 and len(other.calls) == 1
    assert world.pool.targets["r0"].staged is None


async def test_commits_of_replicas_that_left_are_bounded(world):
    """A pool that has run for weeks knows of a replica that joins what a new orchestrator would: the commits that the log keeps."""
    await world.start()
    registry, learner = Registry(world.run), world.learner.log
    for name in ("first", *(f"left-{number}" for number in range(COMMITS_BOUND)), "last"):
        await learner.ack_commit(name, 1, 1, 0.5, 0.5)
    await world.pool.refresh()
    async with AsyncExitStack() as leases:
        for name in ("first", "last"):
            lease = Lease("rollout", name, "127.0.0.1:1", "", API_VERSION, {})
            await leases.enter_async_context(await registry.register(lease))
        await world.pool.refresh()
    assert {name: target.version for name, target in world.pool.targets.items()} == {"first": None, "last": 1}


class SlowCanary(SimulatedInferenceEngine):
    """Answers a canary only when it may. `sampled` has the requests for which it has sampled tokens."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.sampled, self.asked, self.may_answer = set(), asyncio.Event(), asyncio.Event()

    async def generate(self, request):
        async for new in super().generate(request):
            self.sampled.add(request.request_id)
            yield new

    async def logprobs(self, ids, salt):
        self.asked.set()
        await self.may_answer.wait()
        return await super().logprobs(ids, salt)


@pytest.mark.parametrize("passes", [True, False])
async def test_samples_wait_in_the_engine_for_the_canary_of_their_version(world, passes):
    slow, other = await world.start({"engine_type": SlowCanary}, {})
    await world.learner.write(1)
    canary = Canary((3, 4, 5), (-1.0, -1.0), 1e9 if passes else -1.0)
    pushing = asyncio.create_task(world.learner.push(slow, canary))
    await slow.engine.asked.wait()
    await world.pool.refresh()
    generating = asyncio.create_task(world.generate(min_version=1))
    await until(lambda: len(slow.engine.sampled) == 4)
    calls = [sequence.call for sequence in slow.running]
    assert [(call.open_sequences, len(call.response.chunks)) for call in calls] == [(4, 0)] * 4
    slow.engine.may_answer.set()
    if not passes:
        with pytest.raises(SwapError, match="version 1 failed its canary"):
            await pushing
        await world.learner.push(other)
        await world.pool.refresh()
    for one in await asyncio.wait_for(generating, 300):
        assert one.finished and one.spans == [(1, 0, one.length)]
    await asyncio.gather(pushing, return_exceptions=True)
    assert len(slow.calls) == 1 and len(other.calls) == (0 if passes else 1)
