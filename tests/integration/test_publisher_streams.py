"""Weights for replicas that cannot map the arena: complete versions by stream, over real gRPC."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from redis.asyncio import Redis

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.experience.leases import Lease
from polyreme.weights.wire import encode_chunk
from polyreme_trainer.weight_sync import part_streams, replica_client
from polyreme_trainer.weight_sync.replica_client import ReplicaClient, Sent
from polyreme_trainer.weight_sync.version import Version
from support.proxy import Proxy, bad_network
from support.publishing import World, publishing, same
from support.receiver import lease, proxied, serving
from support.waiting import until

DIRECT = {"relay_roots": 100}
"""The learner streams to every replica directly."""


@pytest.fixture
async def world(redis: Redis, redis_url: str, run_id: str) -> AsyncIterator[World]:
    async with publishing(redis, redis_url, run_id, weights=DIRECT) as world:
        yield world


async def test_a_replica_that_cannot_map_gets_every_version_by_stream(world: World) -> None:
    world.arena.unlink()  # as on another host
    async with world.replica("far") as far:
        for version in range(4):
            weights = await world.step()
            await world.publisher.wait_committed(version, 1, 300)
            assert same(far.weights, weights)
        assert list(far.calls) == ["Probe"] + ["StageStream", "Commit"] * 4
        await world.notice("replica far", "cannot map", "by stream", "No such file")
    records = await world.commits()
    assert [record["path"] for record in records] == ["stream"] * 4


async def test_a_late_joiner_of_another_host_and_one_of_this_host_serve_the_same(world: World) -> None:
    await world.step()
    weights = await world.step()
    async with world.replica("near") as near:
        await world.publisher.wait_committed(1, 1, 300)
        world.arena.unlink()
        async with world.replica("far") as far:
            await world.publisher.wait_committed(1, 2, 300)
            assert (near.versions, far.versions) == ([1], [1])
            assert same(near.weights, weights)
            assert same(far.weights, weights)
            weights = await world.step()
            await world.publisher.wait_committed(2, 2, 300)
            assert same(near.weights, weights)
            assert same(far.weights, weights)


async def test_a_broken_stream_is_reported_and_retried(world: World) -> None:
    world.limits.reach_attempts = 1000
    world.limits.chunk_bytes = 16
    world.arena.unlink()
    receiver = world.receiver()
    async with proxied(world.registry, "far", receiver) as proxy:
        weights = await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        proxy.refuse_after(300)  # after the headers, before the last of the weights
        weights = await world.step()
        await world.notice("replica far has not received its weights", "version 1: UNAVAILABLE")
        proxy.heal()
        await world.publisher.wait_committed(1, 1, 300)
        assert same(receiver.weights, weights)
        assert receiver.versions == [0, 1]


async def test_a_stream_that_gets_nothing_through_is_given_up_and_begun_on_a_connection_of_its_own(world: World) -> None:
    world.limits.reach_attempts = 1000
    world.arena.unlink()
    receiver = world.receiver()
    async with proxied(world.registry, "far", receiver) as proxy:
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        world.limits.stream_idle = 1.0
        world.limits.stage = 1.0
        proxy.hold()  # no bytes pass, and neither side notices
        weights = await world.step()
        await world.notice("replica far has not received its weights", "no progress after 0 of")
        world.limits.stream_idle = 300.0
        world.limits.stage = 300.0
        proxy.heal()
        await world.publisher.wait_committed(1, 1, 300)
        assert same(receiver.weights, weights)


async def test_streams_in_trainings_way_are_broken_off_and_begun_anew_but_for_the_oldest(
    redis: Redis, redis_url: str, run_id: str
) -> None:
    begun: list[tuple[str, int]] = []

    class Noting(ReplicaClient):
        def __init__(self, lease: Lease, *rest: Any) -> None:
            super().__init__(lease, *rest)
            self.address = lease.address

        async def stream(self, version: Version) -> Sent:
            begun.append((self.address, version.number))
            return await super().stream(version)

        async def relay(self, manifest: pb.Manifest, *rest: Any) -> Sent:  # from the other replica
            begun.append((self.address, manifest.id.version))
            return await super().relay(manifest, *rest)

    def begun_by(proxy: Proxy) -> list[int]:
        return [number for address, number in begun if address == f"127.0.0.1:{proxy.port}"]

    async with publishing(redis, redis_url, run_id, client=Noting, weights=DIRECT) as world, AsyncExitStack() as stack:
        world.limits.stream_interrupt = 0.05
        world.arena.unlink()
        receivers = [world.receiver() for _ in range(2)]
        servers = [await stack.enter_async_context(serving(receiver)) for receiver in receivers]
        one, two = [await stack.enter_async_context(bad_network("127.0.0.1", server)) for server in servers]
        for name, proxy in (("one", one), ("two", two)):
            await stack.enter_async_context(await world.registry.register(lease(name, proxy.port)))
        await world.step()
        await world.publisher.wait_committed(0, 2, 300)
        for version, slow in ((1, one), (2, two)):
            slow.hold()
            await world.step()
            await until(lambda slow=slow, version=version: version in begun_by(slow))
            if slow is one:
                await world.publisher.wait_committed(1, 1, 300)
        for version in (3, 4, 5, 6):
            weights = await world.step()  # raises when there is no slot
            # Three slots: the stream that is broken off for one version begins anew before the next but one.
            await until(lambda version=version: any(begun >= version - 2 for begun in begun_by(two)))
        one.heal()
        two.heal()
        commits = await world.publisher.wait_committed(6, 2, 300)
        assert {commit.version for commit in commits} == {6}
        assert all(same(receiver.weights, weights) for receiver in receivers)
        assert receivers[0].versions == [0, 1, 6]
        assert begun_by(one) == [0, 1, 6]
        assert len(begun_by(two)) > 4
        assert not [text for text in await world.notices() if "quarantined" in text]


async def test_a_version_that_a_replica_finds_wrong_is_a_failed_swap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(offset: int, data: memoryview) -> bytes:
        return encode_chunk(offset, memoryview(bytes(len(data))))

    monkeypatch.setattr(replica_client, "encode_chunk", damaged)
    world.arena.unlink()
    async with world.replica("far") as far:
        await world.step()
        await world.notice("replica far", "quarantined: it failed 3 times", "DATA_LOSS: version 0: embed differs")
        assert far.versions == []


async def test_no_more_streams_at_once_than_agreed(redis: Redis, redis_url: str, run_id: str) -> None:
    running = most = 0
    full = threading.Event()

    class Counted(ReplicaClient):
        async def stream(self, version: Version) -> Sent:
            nonlocal running, most
            running += 1
            most = max(most, running)
            if running == part_streams.MAX_STREAMS:
                full.set()
            await until(full.is_set)
            await asyncio.sleep(0.01)
            sent = await super().stream(version)
            running -= 1
            return sent

    async with publishing(redis, redis_url, run_id, client=Counted, weights=DIRECT) as world, AsyncExitStack() as stack:
        world.arena.unlink()
        receivers = [await stack.enter_async_context(world.replica(f"far{i}")) for i in range(part_streams.MAX_STREAMS + 4)]
        weights = await world.step()
        await world.publisher.wait_committed(0, len(receivers), 300)
        assert all(same(receiver.weights, weights) for receiver in receivers)
    assert most == part_streams.MAX_STREAMS
