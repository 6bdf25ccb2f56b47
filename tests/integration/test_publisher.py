"""The publisher with real Redis, real gRPC and real shared memory: who gets which version, and what happens when one does not."""

import asyncio
import itertools
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from polyreme import API_VERSION
from polyreme.configfile import parse_config
from polyreme.errors import RunFailedError, StaleTermError, UnavailableError
from polyreme.log.ledger import ExperienceLog, Role, Term
from polyreme.log.run import Run, RunState
from polyreme.log.store import EmbeddedServer, connect
from polyreme.registry import Registry
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme.weights.wire import encode_chunk
from polyreme_trainer.learner import fleet, push
from polyreme_trainer.learner.publish import Publisher
from support.proxy import bad_network
from support.receiver import Receiver, lease, replica, serving

LAYOUT = plan_manifest([TensorSpec("embed", "F32", (7, 4)), TensorSpec("norm", "BF16", (5,))], {"head": "embed"})
CONFIG = {
    "iterations": 1,
    "groups_per_iteration": 1,
    "group_size": 2,
    "model": {"path": "/none"},
    "data": {"train": "/none", "max_prompt_tokens": 8},
    "rollout": {"max_new_tokens": 8, "max_model_len": 16},
    "reward": {"rewards": [{"name": "exact"}]},
    "trainer": {"optimizer": {"lr": 1.0}},
}


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@dataclass
class World:
    """A run with a learner that publishes random weights."""

    run: Run
    log: ExperienceLog
    registry: Registry
    arena: Arena
    publisher: Publisher
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    version: int = -1

    async def step(self) -> dict[str, np.ndarray]:
        """Writes and publishes the next version, as the learner does; gives its tensors."""
        self.version += 1
        slot = await self.publisher.acquire_slot(10)
        self.arena.begin(slot)
        views = tensor_views(LAYOUT, self.arena.slot_view(slot))
        views["embed"][:] = self.rng.normal(size=(7, 4))
        views["norm"][:] = self.rng.integers(0, 2**16, size=5)
        weights = {name: view.copy() for name, view in views.items()}
        generation = self.arena.complete(slot, self.version, self.term)
        self.publisher.publish(self.manifest(), slot, generation)
        return weights

    def manifest(self) -> Manifest:
        return LAYOUT.stamped(self.run.run_id, self.term, self.version)

    @property
    def term(self) -> int:
        assert self.log.term is not None
        return self.log.term.counter

    def receiver(self) -> Receiver:
        return Receiver(self.run.run_id, ["embed", "norm"])

    def replica(self, name: str) -> AbstractAsyncContextManager[Receiver]:
        return replica(self.registry, name, self.receiver())

    async def notice(self, *words: str) -> str:
        """The first notice with all these words, once it is there."""
        async with asyncio.timeout(10):
            while True:
                for text in await self.notices():
                    if all(word in text for word in words):
                        return text
                await asyncio.sleep(0.01)

    async def notices(self) -> list[str]:
        return [record["text"] for _, record in await self.run.records("0", 0) if record["kind"] == "notice"]


@pytest.fixture
async def world(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(fleet, "LEASES_SECONDS", 0.02)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(fleet, "LONGEST_BACKOFF_SECONDS", 0.05)
    redis = await connect(redis_url)
    run = await Run.create(redis, f"test-{uuid.uuid4().hex[:12]}", parse_config(CONFIG, "test"), {})
    log = ExperienceLog(run)
    term = await log.take(Role.LEARNER)
    arena = Arena.create(run.run_id, LAYOUT.nbytes)
    publisher = Publisher(redis_url, run.run_id, term, arena)
    publisher.start()
    yield World(run, log, Registry(run), arena, publisher)
    publisher.close()
    arena.close()
    await redis.aclose()
    assert not arena.path.exists()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it reads what other loops and servers write
            await asyncio.sleep(0.01)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


async def test_every_replica_serves_what_was_written(world: World) -> None:
    async with world.replica("a") as a, world.replica("b") as b:
        for version in range(5):
            weights = await world.step()
            commits = await world.publisher.wait_committed(version, 2, 10)
            assert {commit.replica for commit in commits} == {"a", "b"}
            assert same(a.weights, weights)
            assert same(b.weights, weights)
            assert np.array_equal(a.weights["head"], weights["embed"])
        assert list(a.calls) == ["Probe"] + ["StageArena", "Commit"] * 5
    commits = [record for _, record in await world.log.commits("0", 0)]
    assert sorted((c["replica"], c["version"]) for c in commits) == [*itertools.product("ab", range(5))]
    assert {(c["term"], c["reload_seconds"]) for c in commits} == {(world.term, 0.001)}
    records = [record for _, record in await world.run.records("0", 0) if record["kind"] == "commit"]
    assert len(records) == 10
    assert records[0].keys() == {"kind", "replica", "version", "stall_seconds", "reload_seconds", "path"}
    assert all(0 < record["stall_seconds"] < 10 and record["path"] == "arena" for record in records)


async def test_a_late_joiner_is_brought_to_the_newest_version(world: World) -> None:
    await world.step()
    await world.step()
    weights = await world.step()
    async with world.replica("late") as late:
        await world.publisher.wait_committed(2, 1, 10)
        assert late.versions == [2]
        assert same(late.weights, weights)


async def test_the_newest_version_wins(world: World) -> None:
    async with world.replica("slow") as slow, world.replica("quick") as quick:
        slow.engine.may_load.clear()
        await world.step()
        await until(lambda: "Commit" in slow.calls)
        await world.publisher.wait_committed(0, 1, 10)
        for version in (1, 2, 3):
            weights = await world.step()
            await until(lambda version=version: quick.versions[-1] == version)
        slow.engine.may_load.set()
        await world.publisher.wait_committed(3, 2, 10)
        assert slow.versions == [0, 3]
        assert quick.versions == [0, 1, 2, 3]
        assert same(slow.weights, weights)


async def test_a_failed_swap_restores_the_version_before_and_is_tried_again(world: World) -> None:
    async with world.replica("shaky") as shaky:
        for version in range(3):
            shaky.engine.broken_loads = 1
            weights = await world.step()
            await world.publisher.wait_committed(version, 1, 10)
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
        with pytest.raises(UnavailableError, match=r"2 replicas at version 4 .*bad .*quarantined: it failed 3 times"):
            await world.publisher.wait_committed(4, 2, 0.1)


async def test_a_replica_that_cannot_map_gets_every_version_by_stream(world: World) -> None:
    world.arena.unlink()  # as on another host
    async with world.replica("far") as far:
        for version in range(4):
            weights = await world.step()
            await world.publisher.wait_committed(version, 1, 10)
            assert same(far.weights, weights)
        assert list(far.calls) == ["Probe"] + ["StageStream", "Commit"] * 4
        await world.notice("replica far", "cannot map", "by stream", "No such file")
    records = [record for _, record in await world.run.records("0", 0) if record["kind"] == "commit"]
    assert [record["path"] for record in records] == ["stream"] * 4


async def test_a_late_joiner_of_another_host_and_one_of_this_host_serve_the_same(world: World) -> None:
    await world.step()
    weights = await world.step()
    async with world.replica("near") as near:
        await world.publisher.wait_committed(1, 1, 10)
        world.arena.unlink()
        async with world.replica("far") as far:
            await world.publisher.wait_committed(1, 2, 10)
            assert (near.versions, far.versions) == ([1], [1])
            assert same(near.weights, weights)
            assert same(far.weights, weights)
            weights = await world.step()
            await world.publisher.wait_committed(2, 2, 10)
            assert same(near.weights, weights)
            assert same(far.weights, weights)


async def test_a_broken_stream_is_told_and_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REACH_ATTEMPTS", 1000)
    monkeypatch.setattr(push, "CHUNK_BYTES", 16)
    world.arena.unlink()
    receiver = world.receiver()
    async with serving(receiver) as server, bad_network("127.0.0.1", server) as proxy:
        pieces = 0

        async def cut(_: bytes) -> None:
            nonlocal pieces
            pieces += 1
            if pieces == 4:
                proxy.refuse()

        async with await world.registry.register(lease("far", proxy.port)):
            weights = await world.step()
            await world.publisher.wait_committed(0, 1, 10)
            proxy.listener = cut
            weights = await world.step()
            await world.notice("the way to replica far is broken, it is tried again: version 1: UNAVAILABLE")
            proxy.heal()
            await world.publisher.wait_committed(1, 1, 20)
            assert same(receiver.weights, weights)
            assert receiver.versions == [0, 1]


async def test_a_stream_that_gets_nothing_through_is_given_up_and_begun_on_a_connection_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "REACH_ATTEMPTS", 1000)
    monkeypatch.setattr(push, "STREAM_IDLE_SECONDS", 1.0)
    monkeypatch.setattr(push, "STAGE_SECONDS", 1.0)
    world.arena.unlink()
    receiver = world.receiver()
    async with (
        serving(receiver) as server,
        bad_network("127.0.0.1", server) as proxy,
        await world.registry.register(lease("far", proxy.port)),
    ):
        await world.step()
        await world.publisher.wait_committed(0, 1, 10)
        proxy.hold()  # nothing gets through, and nobody is told
        weights = await world.step()
        await world.notice("the way to replica far is broken", "the stream stood still after 0 of")
        proxy.heal()
        await world.publisher.wait_committed(1, 1, 20)
        assert same(receiver.weights, weights)


async def test_streams_in_trainings_way_are_broken_off_and_begun_anew_but_for_the_oldest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, int]] = []
    real = push.Link.stream

    async def noted(link: push.Link, version: push.Version) -> None:
        begun.append((link._address, version.number))
        await real(link, version)

    monkeypatch.setattr(push.Link, "stream", noted)
    monkeypatch.setattr(fleet, "STREAM_GRACE_SECONDS", 0.05)
    world.arena.unlink()
    receivers = [world.receiver() for _ in range(2)]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(receiver)) for receiver in receivers]
        one, two = [await stack.enter_async_context(bad_network("127.0.0.1", server)) for server in servers]
        for name, proxy in (("one", one), ("two", two)):
            await stack.enter_async_context(await world.registry.register(lease(name, proxy.port)))
        await world.step()
        await world.publisher.wait_committed(0, 2, 10)
        for version, slow in ((1, one), (2, two)):
            slow.hold()
            await world.step()
            await until(lambda slow=slow, version=version: (f"127.0.0.1:{slow.port}", version) in begun)
            if slow is one:
                await world.publisher.wait_committed(1, 1, 10)
        for _ in (3, 4, 5, 6):
            weights = await world.step()  # raises when there is no slot
        one.heal()
        two.heal()
        commits = await world.publisher.wait_committed(6, 2, 20)
        assert {commit.version for commit in commits} == {6}
        assert all(same(receiver.weights, weights) for receiver in receivers)
        assert receivers[0].versions == [0, 1, 6]
        assert [number for address, number in begun if address == f"127.0.0.1:{one.port}"] == [0, 1, 6]
        assert len([number for address, number in begun if address == f"127.0.0.1:{two.port}"]) > 4
        assert not [text for text in await world.notices() if "quarantined" in text]


async def test_a_version_that_a_replica_finds_wrong_is_a_failed_swap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(offset: int, data: memoryview) -> bytes:
        return encode_chunk(offset, memoryview(bytes(len(data))))

    monkeypatch.setattr(push, "encode_chunk", damaged)
    world.arena.unlink()
    async with world.replica("far") as far:
        await world.step()
        await world.notice("replica far", "quarantined: it failed 3 times", "DATA_LOSS: version 0: embed differs")
        assert far.versions == []


async def test_no_more_streams_at_once_than_agreed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    running = most = 0
    full = threading.Event()
    real = push.Link.stream

    async def counted(link: push.Link, version: push.Version) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == fleet.STREAMS:
            full.set()
        await until(full.is_set)
        await asyncio.sleep(0.01)
        await real(link, version)
        running -= 1

    monkeypatch.setattr(push.Link, "stream", counted)
    world.arena.unlink()
    async with AsyncExitStack() as stack:
        receivers = [await stack.enter_async_context(world.replica(f"far{i}")) for i in range(fleet.STREAMS + 4)]
        weights = await world.step()
        await world.publisher.wait_committed(0, len(receivers), 20)
        assert all(same(receiver.weights, weights) for receiver in receivers)
    assert most == fleet.STREAMS


async def test_a_run_whose_replicas_are_all_quarantined_fails_and_says_why(world: World) -> None:
    async with world.replica("bad") as bad:
        bad.engine.broken_loads = 100
        await world.step()
        with pytest.raises(RunFailedError, match=r"bad quarantined: it failed 3 times; version 0: .*broken on command"):
            await world.publisher.wait_committed(0, 1, 10)
    state, reason = await world.run.state()
    assert state is RunState.FAILED
    assert "broken on command" in reason


async def test_a_replica_of_another_api_gets_nothing(world: World) -> None:
    newer = world.receiver()
    async with serving(newer) as port, await world.registry.register(replace(lease("newer", port), api=API_VERSION + 1)):
        await world.step()
        async with world.replica("ours"):
            commits = await world.publisher.wait_committed(0, 1, 10)
    assert [commit.replica for commit in commits] == ["ours"]
    assert not newer.calls


async def test_a_hanging_replica_keeps_its_slots_until_the_deadline_and_no_longer(world: World) -> None:
    async with world.replica("stuck") as stuck, world.replica("good") as good:
        await world.step()
        await world.publisher.wait_committed(0, 2, 10)
        stuck.engine.may_load.clear()
        await world.step()  # stuck holds this one's slot, and the one before, which it serves
        await until(lambda: stuck.calls.count("Commit") == 2 and good.versions[-1] == 1)
        await world.step()
        await until(lambda: good.versions[-1] == 2)
        kept = bytes(world.arena.slot_view(0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await world.publisher.acquire_slot(60)
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
            await world.publisher.wait_committed(0, 2, 10)
            hanging.engine.may_load.clear()
            await world.step()
            await until(lambda: hanging.calls.count("Commit") == 2)
            await world.step()
            await until(lambda: good.versions[-1] == 2)
        async with asyncio.timeout(10):
            assert await world.publisher.acquire_slot(60) in (0, 1)
        assert not [text for text in await world.notices() if "quarantined" in text]
        await world.notice("replica dying", "left")


async def test_a_replica_that_is_not_reachable_yet_is_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REACH_ATTEMPTS", 1000)
    receiver = world.receiver()
    async with serving(receiver) as port:
        pass
    async with await world.registry.register(lease("slow-start", port)):
        await world.step()
        async with asyncio.timeout(10):
            while True:
                with pytest.raises(UnavailableError) as raised:
                    await world.publisher.wait_committed(0, 1, 0.05)
                if "UNAVAILABLE" in raised.value.found:
                    break
        async with serving(receiver, port):
            await world.publisher.wait_committed(0, 1, 10)
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
            await world.publisher.wait_committed(0, 1, 10)
        with pytest.raises(StaleTermError):
            await world.publisher.acquire_slot(1)
        with pytest.raises(StaleTermError):
            world.publisher.publish(world.manifest(), 0, 2)


async def test_a_log_that_knows_a_newer_term_stops_the_publisher(world: World) -> None:
    await ExperienceLog(world.run).take(Role.LEARNER)
    async with world.replica("a"):
        await world.step()
        with pytest.raises(StaleTermError):
            await world.publisher.wait_committed(0, 1, 10)


async def test_a_defect_in_the_publisher_fails_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(fleet.Link, "commit", broken)
    async with world.replica("a"):
        await world.step()
        with pytest.raises(RuntimeError, match="publisher") as raised:
            await world.publisher.wait_committed(0, 1, 10)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert await world.run.state() == (RunState.FAILED, "the weight publisher failed: ZeroDivisionError: a defect")


async def test_a_run_that_is_not_there_is_reported_at_start(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyreme_trainer.learner.publish.ATTACH_SECONDS", 0.1)
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    arena = Arena.create(run_id, LAYOUT.nbytes)
    publisher = Publisher(redis_url, run_id, Term(Role.LEARNER, 1, "x"), arena)
    with pytest.raises(UnavailableError, match=run_id):
        publisher.start()
    publisher.close()
    arena.close()
