"""Versions of several parts, over real gRPC: every part comes from its own machine, and a replica serves all parts of a version or none."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from support.part_machines import PARTS, Machines
from support.publishing import publishing, same
from support.receiver import Receiver, proxied, replica


@pytest.fixture
async def machines(redis: Redis, redis_url: str, run_id: str) -> AsyncIterator[Machines]:
    async with publishing(redis, redis_url, run_id, PARTS[0]) as world:
        world.limits.reach_attempts = 10_000
        machines = Machines(world)
        yield machines
        machines.close()


async def test_replicas_get_all_parts_of_every_version_and_so_does_one_that_joins_late(machines: Machines) -> None:
    world = machines.world
    async with AsyncExitStack() as stack:
        early = [await stack.enter_async_context(replica(world.registry, f"r{i}", machines.receiver())) for i in range(2)]
        for version in range(5):
            weights = await machines.step()
            await world.publisher.wait_committed(version, 2, 300)
            assert all(same(receiver.weights, weights) for receiver in early)
        late = await stack.enter_async_context(replica(world.registry, "late", machines.receiver()))
        [*_, commit] = await world.publisher.wait_committed(4, 3, 300)
        assert same(late.weights, weights) and late.versions == [4]
        assert (commit.transfer.path, commit.transfer.bytes, commit.transfer.hops) == ("stream", 0, 2)
        assert commit.transfer.relayed_bytes == sum(layout.nbytes for layout in PARTS)
        assert all(receiver.versions == [*range(5)] for receiver in early)


async def test_a_lost_part_is_reported_and_fetched_when_its_machine_is_back(machines: Machines) -> None:
    world = machines.world
    async with replica(world.registry, "r", machines.receiver()) as receiver:
        before = await machines.step()
        await world.publisher.wait_committed(0, 1, 300)
        address = machines.servers[1].address
        machines.lose(1)
        await machines.step()
        await world.notice("replica r", "part 1 of version 1", address)
        assert receiver.versions == [0] and same(receiver.weights, before)
        machines.bring_back(1)
        weights = await machines.step()  # a restarted learner announces its new address
        await world.publisher.wait_committed(2, 1, 300)
        assert receiver.versions == [0, 2] and same(receiver.weights, weights)


async def test_a_connection_that_gets_nothing_through_ends_all_transfers_and_is_begun_anew(machines: Machines) -> None:
    world, receiver = machines.world, machines.receiver()
    async with proxied(world.registry, "far", receiver) as proxy:
        await machines.step()
        await world.publisher.wait_committed(0, 1, 300)
        world.limits.stream_idle = world.limits.stage = 1.0
        world.limits.stream_bytes_per_second = 1e3  # fetches of small parts do not end earlier
        proxy.hold()  # the stream of the first part gives up first, and closes the connection under the fetch of the second
        weights = await machines.step()
        await world.notice("replica far has not received its weights", "no progress after 0 of")
        world.limits.stream_idle = world.limits.stage = 300.0
        proxy.heal()
        await world.publisher.wait_committed(1, 1, 300)
        assert receiver.versions == [0, 1] and same(receiver.weights, weights)


async def test_a_part_with_other_bytes_is_never_served(machines: Machines) -> None:
    world = machines.world
    async with replica(world.registry, "r", machines.receiver()) as receiver:
        before = await machines.step()
        await world.publisher.wait_committed(0, 1, 300)
        await machines.step(damaged=True)
        await world.notice("replica r", "part 1 of version 1", "DATA_LOSS")
        assert receiver.versions == [0] and same(receiver.weights, before)
        weights = await machines.step()
        await world.publisher.wait_committed(2, 1, 300)
        assert receiver.versions == [0, 2] and same(receiver.weights, weights)


async def test_a_replica_that_joins_while_a_part_is_being_written_gets_the_version_before(machines: Machines) -> None:
    world = machines.world
    async with AsyncExitStack() as stack:
        before = await machines.step()
        late: list[Receiver] = []

        async def join() -> None:
            late.append(await stack.enter_async_context(replica(world.registry, "late", machines.receiver())))
            await world.publisher.wait_committed(0, 1, 300)
            assert same(late[0].weights, before)

        weights = await machines.step(between=join)
        await world.publisher.wait_committed(1, 1, 300)
        assert late[0].versions == [0, 1] and same(late[0].weights, weights)
