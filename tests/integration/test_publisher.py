"""The publisher with real Redis, gRPC and shared memory: the version of each replica, and failed pushes."""

import asyncio
import itertools
import threading
import uuid
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import NoReturn

import pytest
from redis.asyncio import Redis

from polyreme import API_VERSION
from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.errors import RunFailedError, StaleTermError, UnavailableError
from polyreme.experience.leases import Lease
from polyreme.experience.ledger import ExperienceLog, Term, Writer
from polyreme.experience.run import RunState
from polyreme.weights.arena import Arena
from polyreme_trainer.weight_sync.publisher import Publisher, PublisherState
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.replica_client import ReplicaClient, Sent
from polyreme_trainer.weight_sync.version import Version
from support.publishing import CONFIG, LAYOUT, World, publishing, same
from support.receiver import lease, replica, serving
from support.waiting import until


async def test_every_replica_serves_what_was_written(world: World) -> None:
    async with world.replica("a") as a, world.replica("b") as b:
        for version in range(5):
            weights = await world.step()
            commits = await world.publisher.wait_committed(version, 2, 300)
            assert {commit.replica for commit in commits} == {"a", "b"}
            assert same(a.weights, weights)
            assert same(b.weights, weights)
            assert a.weights["head"].tobytes() == weights["embed"].tobytes()
        assert list(a.calls) == ["Probe"] + ["StageArena", "Commit"] * 5
    states = [record for _, record in await world.log.commits("0")]
    for name in "ab":
        told = [(state["version"], state["state"]) for state in states if state["replica"] == name]
        assert told == [*itertools.product(range(5), ("staged", "served"))]
    commits = [state for state in states if state["state"] == "served"]
    assert sorted((c["replica"], c["version"]) for c in commits) == [*itertools.product("ab", range(5))]
    assert {c["term"] for c in commits} == {world.term}
    assert all(0 < c["reload_seconds"] <= c["stall_seconds"] for c in commits)
    records = await world.commits()
    assert len(records) == 10
    assert records[0].keys() == {"kind", "replica", "version", "stall_seconds", "reload_seconds", "path", "bytes"}
    assert all(record["stall_seconds"] > 0 and (record["path"], record["bytes"]) == ("arena", 0) for record in records)


async def test_a_late_joiner_is_brought_to_the_newest_version(world: World) -> None:
    await world.step()
    await world.step()
    weights = await world.step()
    async with world.replica("late") as late:
        await world.publisher.wait_committed(2, 1, 300)
        assert late.versions == [2]
        assert same(late.weights, weights)


@pytest.mark.parametrize(("cpu_sleep", "expected"), [("pause", ["joined", "left", "joined"]), ("end", [])])
async def test_members_are_news_unless_engines_end_in_every_turn(
    cpu_sleep: str, expected: list[str], redis: Redis, redis_url: str, run_id: str
) -> None:
    rollout = {**CONFIG["rollout"], "cpu_sleep": cpu_sleep}  # type: ignore[dict-item]
    async with publishing(redis, redis_url, run_id, placement="colocated", max_staleness=0, rollout=rollout) as world:
        await world.step()
        async with world.replica("first"):
            await world.publisher.wait_committed(0, 1, 300)
        await until(lambda: not world.sync.replicas)
        async with world.replica("second"):
            await world.publisher.wait_committed(0, 1, 300)
            if expected:
                await world.notice("second", "joined")
            assert [text.rsplit(" ", 1)[1] for text in await world.notices()] == expected


async def test_nothing_is_pushed_while_the_replicas_have_left_their_devices(world: World) -> None:
    async with world.replica("a") as a:
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        await world.publisher.set_devices_train(True)
        calls = len(a.calls)
        weights = await world.step()
        async with world.replica("late") as late:
            await until(lambda: set(world.sync.replicas) == {"a", "late"})
            await asyncio.sleep(0.1)
            assert len(a.calls) == calls and not late.calls
            await world.publisher.set_devices_train(False)
            await world.publisher.wait_committed(1, 2, 300)
            assert same(a.weights, weights) and same(late.weights, weights)


async def test_a_push_that_fails_because_the_devices_changed_hands_is_no_failed_swap(world: World) -> None:
    async with world.replica("a") as a:
        swapper, sync = a.swapper, world.sync
        async with swapper.paused_for_devices():
            await world.step()
            await until(lambda: "Commit" in a.calls)
            await world.publisher.set_devices_train(True)
            a.has_devices = False
        await until(lambda: sync.replicas["a"].call.done())
        await world.publisher.set_devices_train(True)  # the publisher has then seen the failure
        assert swapper.version is None and sync.replicas["a"].swap_failures == 0
        a.has_devices = True
        await world.publisher.set_devices_train(False)
        await world.publisher.wait_committed(0, 1, 300)


@pytest.mark.parametrize(("way", "call"), [("stage", "StageArena"), ("stream", "StageStream")])
async def test_a_staged_version_is_not_committed_once_the_devices_train(
    redis: Redis, redis_url: str, run_id: str, way: str, call: str
) -> None:
    staged = threading.Event()

    class Overtaken(ReplicaClient):
        """The devices train once the first version is staged."""

        async def stage(self, version: Version) -> None:
            await super().stage(version)
            await self.overtake()

        async def stream(self, version: Version) -> Sent:
            sent = await super().stream(version)
            await self.overtake()
            return sent

        async def overtake(self) -> None:
            if not staged.is_set():
                await sync.set_devices_train(True)
                staged.set()

    async with publishing(redis, redis_url, run_id, client=Overtaken) as world, AsyncExitStack() as stack:
        sync, a = world.sync, world.receiver()
        a.maps = way == "stage"
        await stack.enter_async_context(replica(world.registry, "a", a))
        await world.step()
        await until(staged.is_set)
        await until(lambda: sync.replicas["a"].call.done())
        await world.publisher.set_devices_train(True)
        assert list(a.calls) == ["Probe", call] and sync.replicas["a"].swap_failures == 0
        await world.publisher.set_devices_train(False)
        await world.publisher.wait_committed(0, 1, 300)


async def test_the_newest_version_wins(world: World) -> None:
    async with world.replica("slow") as slow, world.replica("quick") as quick:
        slow.engine.may_load.clear()
        await world.step()
        await until(lambda: "Commit" in slow.calls)
        await world.publisher.wait_committed(0, 1, 300)
        for version in (1, 2, 3):
            weights = await world.step()
            await until(lambda version=version: quick.versions[-1] == version)
        slow.engine.may_load.set()
        await world.publisher.wait_committed(3, 2, 300)
        assert slow.versions == [0, 3]
        assert quick.versions == [0, 1, 2, 3]
        assert same(slow.weights, weights)


async def test_a_failed_swap_restores_the_version_before_and_is_tried_again(world: World) -> None:
    async with world.replica("shaky") as shaky:
        for version in range(3):
            shaky.engine.broken_loads = 1
            weights = await world.step()
            await world.publisher.wait_committed(version, 1, 300)
            assert same(shaky.weights, weights)
        assert shaky.versions == [0, 0, 1, 1, 2]  # served again after the failures of versions 1 and 2


async def test_three_failed_swaps_in_a_row_are_a_quarantine(world: World) -> None:
    async with world.replica("bad") as bad, world.replica("good") as good:
        bad.engine.broken_loads = 100
        await world.step()
        await until(lambda: bad.calls.count("Commit") == 3)
        for version in (1, 2, 3, 4):
            await world.step()
            await until(lambda version=version: good.versions == [*range(version + 1)])
        assert bad.calls.count("Commit") == 3
        assert bad.versions == []
        notices = [text for text in await world.notices() if "quarantined" in text]
        assert len(notices) == 1
        assert "replica bad" in notices[0]
        assert "3 times" in notices[0]
        assert "INTERNAL: version 0 could not be loaded: broken on command" in notices[0]
        with pytest.raises(UnavailableError, match=r"version 4 .*bad .*quarantined"):
            await world.publisher.wait_committed(4, 2, 0.1)


async def test_a_run_whose_replicas_are_all_quarantined_fails_with_the_reason(world: World) -> None:
    async with world.replica("bad") as bad:
        bad.engine.broken_loads = 100
        await world.step()
        with pytest.raises(RunFailedError, match=r"bad quarantined.*broken on command"):
            await world.publisher.wait_committed(0, 1, 300)
    state, reason = await world.run.state()
    assert state is RunState.FAILED
    assert "broken on command" in reason


async def test_a_replica_of_another_api_gets_nothing(world: World) -> None:
    newer = world.receiver()
    async with serving(newer) as port, await world.registry.register(replace(lease("newer", port), api=API_VERSION + 1)):
        await world.step()
        async with world.replica("ours"):
            commits = await world.publisher.wait_committed(0, 1, 300)
    assert [commit.replica for commit in commits] == ["ours"]
    assert not newer.calls


async def test_a_hanging_replica_keeps_its_slots_until_the_deadline_and_no_longer(world: World) -> None:
    async with world.replica("stuck") as stuck, world.replica("good") as good:
        await world.step()
        await world.publisher.wait_committed(0, 2, 300)
        stuck.engine.may_load.clear()
        await world.step()  # stuck holds this one's slot, and the one before, which it serves
        await until(lambda: stuck.calls.count("Commit") == 2 and good.versions[-1] == 1)
        await world.step()
        await until(lambda: good.versions[-1] == 2)
        kept = bytes(world.arena.slot_view(0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await world.publisher.acquire_slot(300)
        assert await world.publisher.acquire_slot(0.05) == 0
        assert bytes(world.arena.slot_view(0)) == kept
        await world.step()
        await until(lambda: good.versions == [0, 1, 2, 3])
        stuck.engine.may_load.set()
        await until(lambda: stuck.versions[-1] == 3)
        assert not [text for text in await world.notices() if "quarantined" in text]


async def test_a_lost_lease_frees_the_slots(world: World) -> None:
    async with world.replica("good") as good:
        async with world.replica("dying") as hanging:
            await world.step()
            await world.publisher.wait_committed(0, 2, 300)
            hanging.engine.may_load.clear()
            await world.step()
            await until(lambda: hanging.calls.count("Commit") == 2)
            await world.step()
            await until(lambda: good.versions[-1] == 2)
        async with asyncio.timeout(300):
            assert await world.publisher.acquire_slot(600) in (0, 1)
        assert not [text for text in await world.notices() if "quarantined" in text]
        await world.notice("replica dying", "left")


class LosesCancellation(ReplicaClient):
    """Commits a version of the replica `dying` although the push is cancelled, as one that waits for Redis may on Python 3.11."""

    def __init__(self, lease: Lease, arena: Arena, security: SecurityConfig | None, limits: PushLimits) -> None:
        super().__init__(lease, arena, security, limits)
        self.is_dying, self.waits = lease.id == "dying", threading.Event()

    async def commit(self, version: Version) -> pb.CommitResponse:
        if not self.is_dying or version.number == 0:
            return await super().commit(version)
        self.waits.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return pb.CommitResponse(version=version.number)


async def test_a_push_that_outlasts_its_replica_keeps_no_slot(redis: Redis, redis_url: str, run_id: str) -> None:
    async with publishing(redis, redis_url, run_id, client=LosesCancellation) as world, world.replica("good") as good:
        async with world.replica("dying"):
            await world.step()
            await world.publisher.wait_committed(0, 2, 300)
            await world.step()
            dying = world.sync.replicas["dying"].client
            assert isinstance(dying, LosesCancellation)
            await until(dying.waits.is_set)
            await world.publisher.wait_committed(1, 1, 300)
        await world.notice("replica dying", "left")
        await world.step()
        await world.publisher.wait_committed(2, 1, 300)
        good.engine.may_load.clear()
        await world.step()
        await until(lambda: good.calls.count("Commit") == 4)  # it holds this slot, and the one before
        assert await world.publisher.acquire_slot(0.05) == 2
        good.engine.may_load.set()


async def test_a_replica_that_is_not_reachable_yet_is_tried_again(world: World) -> None:
    world.limits.reach_attempts = 1000
    receiver = world.receiver()
    async with serving(receiver) as port:
        pass
    async with await world.registry.register(lease("slow-start", port)):
        await world.step()
        async with asyncio.timeout(300):
            while True:
                with pytest.raises(UnavailableError) as raised:
                    await world.publisher.wait_committed(0, 1, 0.05)
                if "UNAVAILABLE" in raised.value.found:
                    break
        async with serving(receiver, port):
            await world.publisher.wait_committed(0, 1, 300)
            assert receiver.versions == [0]


async def test_an_unreachable_replica_is_given_up(world: World) -> None:
    async with serving(world.receiver()) as port:
        pass
    async with await world.registry.register(lease("gone", port)):
        await world.step()
        await world.notice("replica gone", "quarantined: it failed 10 times; version 0: UNAVAILABLE")


async def test_a_replica_that_knows_a_newer_term_stops_the_publisher(world: World) -> None:
    async with world.replica("a") as receiver:
        receiver.term = world.term + 1
        await world.step()
        with pytest.raises(StaleTermError, match="taken over"):
            await world.publisher.wait_committed(0, 1, 300)
        with pytest.raises(StaleTermError):
            await world.publisher.acquire_slot(1)
        with pytest.raises(StaleTermError):
            world.publisher.publish(world.manifest(), 0, 2)


async def test_a_log_that_knows_a_newer_term_stops_the_publisher(world: World) -> None:
    await ExperienceLog(world.run).take(Writer.LEARNER)
    async with world.replica("a"):
        await world.step()
        with pytest.raises(StaleTermError):
            await world.publisher.wait_committed(0, 1, 300)


async def test_a_defect_in_the_publisher_fails_the_run(redis: Redis, redis_url: str, run_id: str) -> None:
    class Broken(ReplicaClient):
        async def commit(self, version: Version) -> NoReturn:
            raise ZeroDivisionError("a defect")

    async with publishing(redis, redis_url, run_id, client=Broken) as world, world.replica("a"):
        await world.step()
        with pytest.raises(RuntimeError, match="publisher") as raised:
            await world.publisher.wait_committed(0, 1, 300)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert await world.run.state() == (RunState.FAILED, "the weight publisher failed: ZeroDivisionError: a defect")


async def test_a_run_that_is_not_there_is_reported_at_start(redis_url: str) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    arena = Arena.create(run_id, LAYOUT.nbytes)
    publisher = Publisher(redis_url, run_id, Term(Writer.LEARNER, 1, "x"), arena, PushLimits(attach=0.1))
    assert publisher.state is PublisherState.NEW
    with pytest.raises(RuntimeError, match="not started"):
        await publisher.acquire_slot(300)
    with pytest.raises(UnavailableError, match=run_id):
        publisher.start()
    with pytest.raises(UnavailableError, match=run_id):
        await publisher.acquire_slot(300)
    assert publisher.state is PublisherState.FAILED
    publisher.close()
    arena.close()


async def test_a_closed_publisher_answers_no_call(world: World) -> None:
    assert world.publisher.state is PublisherState.RUNNING
    world.publisher.close()
    assert world.publisher.state is PublisherState.CLOSED
    with pytest.raises(RuntimeError, match="closed"):
        await world.publisher.acquire_slot(300)
