"""One prompt's samples over simulated replicas with real gRPC: exact tokens, exact continuations, clear failures."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from polyreme.api.v1 import experience_pb2
from polyreme.errors import UnavailableError
from polyreme_rollout.engine.protocol import Sampling
from polyreme_rollout.testing.simulated_engine import Failures, Lengths, sample
from polyreme_trainer.orchestrator.generation.generate import GenerateError, generate
from polyreme_trainer.orchestrator.replicas.claim import Claim
from support.generation_world import PROMPT, generation_world
from support.simulated import VOCAB
from support.waiting import until

STOP, LENGTH = experience_pb2.FINISH_REASON_STOP, experience_pb2.FINISH_REASON_LENGTH


@pytest.fixture
async def world(redis, run_id, tmp_path):
    async with generation_world(redis, run_id, tmp_path) as world:
        yield world


def expected(engine, seed, max_new=96, prefix=(), temperature=1.0):
    sampling = Sampling(temperature, 1.0, -1, (1,))
    return sample(engine.policy, [*PROMPT.tolist(), *prefix], seed, sampling, max_new, VOCAB, engine.lengths)


async def test_tokens_of_one_replica(world):
    profile = {"lengths": Lengths(30)}
    (replica,) = await world.start(profile)
    samples = await world.generate(count=8)
    assert len({one.length for one in samples}) > 3
    assert [call.gather_ms for call in replica.calls] == [200]  # with few calls, tokens come soon
    for one in samples:
        ids, logprobs = expected(replica.engine, 1000 * one.index)
        assert one.token_ids().tolist() == ids
        assert one.token_logprobs().tolist() == np.float32(logprobs).tolist()
        assert one.finish_reason == (STOP if ids[-1] == 1 else LENGTH)
        assert one.spans == [(0, 0, len(ids))]
    assert len(replica.calls) == 1 and replica.service.ready


async def test_load_goes_to_the_idle_replica_and_is_given_back(world):
    slow = {"step_seconds": 0.005, "lengths": Lengths(1e9)}
    replicas = await world.start(slow, slow)
    await asyncio.gather(*(world.generate() for _ in range(6)))
    assert [len(replica.calls) for replica in replicas] == [3, 3]
    assert [target.outstanding for target in world.pool.targets.values()] == [0, 0]


async def test_a_claim_that_is_cut_as_a_message_comes_ends_its_call(world, monkeypatch):
    slow = {"step_seconds": 0.01, "lengths": Lengths(1e9)}  # several messages' time
    cut, other = await world.start(slow, slow)
    arrived = Claim.arrived
    responses = []

    def arrive(claim, *arguments):
        arrived(claim, *arguments)
        if claim.target.id == cut.id:
            responses.append(claim)
            claim.cut()

    monkeypatch.setattr(Claim, "arrived", arrive)
    samples = await world.generate()
    assert len(responses) == len(cut.calls) == 1 and len(other.calls) == 1
    for one in samples:
        assert one.length == 96


async def test_replicas_that_are_asleep_get_no_call_and_their_calls_have_no_deadline(world):
    (replica,) = await world.start({"step_seconds": 0.01, "lengths": Lengths(1e9)})
    running = asyncio.create_task(world.generate(max_new=200))
    await world.a_chunk_came()
    await replica.engine.pause()
    [claim] = world.pool._claims
    assert claim.deadline.when() is not None
    world.pool.set_asleep(True)
    waiting = asyncio.create_task(world.generate())
    await until(lambda: bool(world.pool.waiting))
    assert claim.deadline.when() is None and len(replica.calls) == 1
    await replica.engine.resume()
    world.pool.set_asleep(False)
    assert claim.deadline.when() is not None
    for samples in await asyncio.gather(running, waiting):
        assert len(samples) == 4
    assert len(replica.calls) == 2  # the first call went on


async def test_a_call_that_begins_when_its_replica_has_fallen_asleep_has_no_deadline(world, monkeypatch):
    await world.start({"lengths": Lengths(1e9)})
    deadlines = []

    def begin(*arguments):
        claim = began(*arguments)
        world.pool.set_asleep(True)
        return claim

    def arrive(claim, *arguments):
        deadlines.append(claim.deadline.when())
        arrived(claim, *arguments)

    began, arrived = world.pool._begin, Claim.arrived
    monkeypatch.setattr(world.pool, "_begin", begin)
    monkeypatch.setattr(Claim, "arrived", arrive)
    assert len(await world.generate()) == 4
    assert deadlines[0] is None


async def test_work_waits_for_room_and_goes_to_the_replica_that_has_it_first(world):
    """Work does not wait at a chosen replica, so neither long answers nor a full pool keep a replica idle."""
    slow, fast = await world.start(*[{"lengths": Lengths(1e9)}] * 2)
    await slow.engine.pause()
    generating = [asyncio.create_task(world.generate(count=12)) for _ in range(8)]
    await until(lambda: sum(task.done() for task in generating) == 7)
    await slow.engine.resume()
    await asyncio.gather(*generating)
    assert (len(slow.calls), len(fast.calls)) == (1, 7)
    assert [target.sequences for target in world.pool.targets.values()] == [0, 0]


async def test_a_replica_that_joins_gets_waiting_work_at_once(world):
    slow = {"step_seconds": 10.0, "lengths": Lengths(1e9)}
    busy, late = await world.start(slow, slow)
    await world.learner.log.run.redis.delete(world.run.key("commits"))
    world.pool.targets["r1"].version = None
    generating = [asyncio.create_task(world.generate(count=12)) for _ in range(2)]
    await busy.asked.wait()
    await until(lambda: bool(world.pool.waiting))
    assert not late.calls
    await world.learner.push(late)
    await world.pool.refresh()
    await asyncio.wait_for(late.asked.wait(), 300)
    assert not any(task.done() for task in generating), "it had no end to wait for"
    for task in generating:
        task.cancel()
    await asyncio.gather(*generating, return_exceptions=True)


@pytest.fixture
async def eight_groups_for_version_1(redis, run_id, tmp_path):
    """Starts two replicas at version 0, the first of which begins to serve version 1, for which eight groups wait."""

    @asynccontextmanager
    async def start(share_seconds):
        endless = {"step_seconds": 10.0, "lengths": Lengths(1e9)}
        async with generation_world(redis, run_id, tmp_path, capacity=1000, share_seconds=share_seconds) as world:
            replicas = await world.start(endless, endless)
            generating = [asyncio.create_task(world.generate(count=12, min_version=1)) for _ in range(8)]
            await until(lambda: world.pool.waiting == 8)
            await world.learner.write(1)
            await world.learner.push(replicas[0])
            await world.pool.refresh()
            yield world, *replicas
            for task in generating:
                task.cancel()
            await asyncio.gather(*generating, return_exceptions=True)

    return start


async def test_a_replica_that_is_about_to_serve_a_version_keeps_its_share(eight_groups_for_version_1):
    async with eight_groups_for_version_1(share_seconds=3600.0) as (world, first, second):
        await until(lambda: len(first.calls) == 4)
        assert world.pool.waiting == 4
        await world.learner.push(second)
        await world.pool.refresh()
        await until(lambda: len(second.calls) == 4)
        assert len(first.calls) == 4 and not world.pool.waiting


async def test_a_share_is_kept_for_a_short_time_only(eight_groups_for_version_1):
    async with eight_groups_for_version_1(share_seconds=0.05) as (_, first, _):
        await until(lambda: len(first.calls) == 8)


async def test_waiting_work_of_older_versions_goes_first_and_a_cancelled_wait_leaves_nothing(world):
    await world.start({"step_seconds": 0.002, "lengths": Lengths(1e9)})
    names = []

    async def one(version, name):
        async with world.pool.claim(100, 12, version):
            names.append(name)
            await asyncio.sleep(0.01)

    async with world.pool.claim(100, 12, 0):
        tasks = [asyncio.create_task(one(*wanted)) for wanted in ((0, "first"), (-1, "older"), (0, "cancelled"), (0, "last"))]
        await until(lambda: world.pool.waiting == 4)
        assert not names
        tasks[2].cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert names == ["older", "first", "last"]
    (target,) = world.pool.targets.values()
    assert (target.outstanding, target.sequences, world.pool.waiting) == (0, 0, 0)


async def test_a_replica_that_dies_midstream_is_continued_exactly(world):
    profile = {"lengths": Lengths(60)}
    dying, other = await world.start({**profile, "failures": Failures(die_after=100)}, profile)
    samples = await world.generate(count=4)  # r0 is the first choice
    assert dying.engine.dead and len(other.calls) == 1
    prefixes = {slot.index: np.frombuffer(slot.prefix_ids, "<i4").tolist() for slot in other.calls[0].slots}
    assert any(prefixes.values())
    for one in samples:
        first, first_logprobs = expected(dying.engine, 1000 * one.index)
        prefix = prefixes.get(one.index, first)
        assert (prefix == first[: len(prefix)] and len(prefix) % 16 == 0) or prefix == first
        rest, rest_logprobs = [], []
        if one.index in prefixes:
            rest, rest_logprobs = expected(other.engine, 1000 * one.index + len(prefix), 96 - len(prefix), prefix)
        assert one.token_ids().tolist() == prefix + rest
        assert one.token_logprobs().tolist() == np.float32(first_logprobs[: len(prefix)] + rest_logprobs).tolist()
        assert one.spans == [(0, 0, one.length)] and one.finished


async def test_greedy_continuation_equals_an_uninterrupted_answer(world):
    profile = {"lengths": Lengths(200)}
    dying, _ = await world.start({**profile, "failures": Failures(die_after=40)}, profile)
    (one,) = await world.generate(count=1, temperature=0.0)
    assert one.token_ids().tolist() == expected(dying.engine, 0, temperature=0.0)[0]


async def test_a_vanished_replica_is_continued_at_once(world):
    profile = {"lengths": Lengths(1e9)}
    gone, other = await world.start({**profile, "failures": Failures(silent_after=64)}, profile)
    generating = asyncio.create_task(world.generate(count=1))
    await world.a_chunk_came()
    await gone.vanish()
    await world.pool.refresh()
    (draft,) = await generating
    assert draft.length == 96 and len(other.calls) == 1
    assert len(other.calls[0].slots[0].prefix_ids) >= 4 * 16  # bytes of an int32 each


async def test_a_silent_replica_is_left_when_its_lease_ends(world):
    """A stopped process neither answers nor refuses, but the call must not wait for the idle deadline."""
    profile = {"lengths": Lengths(1e9)}
    silent, other = await world.start({**profile, "failures": Failures(silent_after=32)}, profile)
    generating = asyncio.create_task(generate(world.pool, world.wanted(count=1), chunk_timeout=3600.0, progress_timeout=3600.0))
    await silent.asked.wait()
    await silent.lose_lease()
    await world.pool.refresh()
    (draft,) = await asyncio.wait_for(generating, 300)
    assert draft.length == 96 and len(other.calls) == 1


async def test_a_replica_that_leaves_before_the_call_on_it_begins_is_not_called(world):
    """The channel of the replica is closed by then."""
    gone, other = await world.start({}, {})
    async with AsyncExitStack() as full:
        busy = [await full.enter_async_context(world.pool.claim(1, 12, 0)) for _ in range(2)]
        assert [claim.target.id for claim in busy] == [gone.id, other.id]
        generating = asyncio.create_task(world.generate(count=1))
        await until(lambda: bool(world.pool.waiting))  # for room
        busy[0].end(time.monotonic())  # it has a claim now, but has not been woken
        await world.pool._remove(gone.id)
    assert len(await asyncio.wait_for(generating, 300)) == 1
    assert not gone.calls and len(other.calls) == 1


async def test_a_silent_replica_is_left_at_the_idle_deadline(world):
    profile = {"lengths": Lengths(1e9)}
    await world.start({**profile, "failures": Failures(silent_after=32)}, profile)
    (draft,) = await generate(world.pool, world.wanted(count=1), chunk_timeout=0.3, progress_timeout=600.0)
    assert draft.length == 96


async def test_no_replica_says_what_is_there(world):
    await world.start({})
    world.pool._start_timeout = 1.0
    await world.learner.log.run.redis.hset(world.run.key("meta"), "version", 3)
    await world.pool.refresh()
    with pytest.raises(UnavailableError, match=r"rollout\.start_timeout = 1 s.*r0 \(version 0\)"):
        await world.generate(min_version=3)


async def test_all_replicas_broken_fails_the_run(world):
    world.pool._start_timeout = 1.0
    dead, *_ = await world.start({"failures": Failures(die_after=0)})
    with pytest.raises((UnavailableError, GenerateError), match="r0"):
        await world.generate()
    assert dead.engine.dead


async def test_a_request_that_no_replica_takes_fails_at_once(world):
    (replica,) = await world.start({})
    with pytest.raises(GenerateError, match=r"INVALID_ARGUMENT.*max_model_len"):
        await world.generate(max_new=1000)
    assert len(replica.calls) == 1
