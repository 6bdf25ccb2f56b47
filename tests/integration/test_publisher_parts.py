"""Versions of several parts, over real gRPC: every part comes from its own machine, and a replica serves all parts of a version or none."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count

import numpy as np
import pytest
from redis.asyncio import Redis

from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import RemotePart, TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.megatron.part_server import PartServer
from polyreme_trainer.weight_sync import replica_client, replica_push
from support.proxy import bad_network
from support.publishing import World, publishing, push_soon, same
from support.receiver import Receiver, lease, replica, serving

FIRST = plan_manifest([TensorSpec("embed", "F32", (7, 4)), TensorSpec("low", "BF16", (999,))], {"head": "embed"}, 0, 2)
SECOND = plan_manifest([TensorSpec("high", "F32", (300, 2000)), TensorSpec("norm", "BF16", (5,))], None, 1, 2)
NAMES = ["embed", "low", "high", "norm"]


class TwoMachines:
    """A learner on two machines: the first publishes, the second serves its part."""

    def __init__(self, world: World) -> None:
        self.world, self.numbers = world, count()
        self.arena = Arena.create(world.run.run_id, SECOND.nbytes, part=1)
        self.server = self.serve()

    def serve(self) -> PartServer:
        return PartServer(self.arena, 1, self.world.run.run_id, "127.0.0.1")

    async def step(self, damaged: bool = False, between: Callable[[], Awaitable[None]] | None = None) -> dict[str, np.ndarray]:
        """Publishes the next version and returns its tensors.

        Args:
            damaged: the second machine's bytes change after their digests.
            between: awaited when the first part is sealed and the second is being written.
        """
        world, version = self.world, next(self.numbers)
        slot = await world.publisher.acquire_slot(300)
        weights, sealed = {}, []
        for arena, layout in ((world.arena, FIRST), (self.arena, SECOND)):
            arena.begin(slot)
            for name, view in tensor_views(layout, arena.slot_view(slot)).items():
                if name != "head":
                    view[...] = np.frombuffer(world.rng.bytes(view.nbytes), view.dtype).reshape(view.shape)
                weights[name] = view.copy()
            if arena is self.arena and between:
                await between()
            weights |= {alias: weights[target] for alias, target in (("head", "embed"),)}
            sealed.append(seal(layout.stamped(world.run.run_id, world.term, version), arena.slot_view(slot)))
            generation = arena.complete(slot, version, world.term)
        if damaged:
            self.arena.slot_view(slot)[12345] ^= 1
        parts = (RemotePart(sealed[1], self.server.address),)
        world.publisher.publish(sealed[0], slot, generation, parts=parts)
        return weights

    def receiver(self) -> Receiver:
        return Receiver(self.world.run.run_id, NAMES)


@pytest.fixture
async def machines(redis: Redis, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoMachines]:
    push_soon(monkeypatch)
    monkeypatch.setattr(replica_push, "REACH_ATTEMPTS", 10_000)
    async with publishing(redis, redis_url, run_id, FIRST) as world:
        machines = TwoMachines(world)
        yield machines
        machines.server.close()
        machines.arena.close()


async def test_replicas_get_all_parts_of_every_version_and_so_does_one_that_joins_late(machines: TwoMachines) -> None:
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
        assert commit.transfer.path == "stream" and commit.transfer.bytes == FIRST.nbytes + SECOND.nbytes
        assert all(receiver.versions == [*range(5)] and "Fetch" not in receiver.calls for receiver in early)


async def test_a_lost_part_is_reported_and_fetched_when_its_machine_is_back(machines: TwoMachines) -> None:
    world = machines.world
    async with replica(world.registry, "r", machines.receiver()) as receiver:
        before = await machines.step()
        await world.publisher.wait_committed(0, 1, 300)
        address = machines.server.address
        machines.server.close()
        await machines.step()
        await world.notice("replica r", "part 1 of version 1", address)
        assert receiver.versions == [0] and same(receiver.weights, before)
        machines.server = machines.serve()
        weights = await machines.step()  # a restarted learner announces its new address
        await world.publisher.wait_committed(2, 1, 300)
        assert receiver.versions == [0, 2] and same(receiver.weights, weights)


async def test_a_connection_that_gets_nothing_through_ends_all_transfers_and_is_begun_anew(
    machines: TwoMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, receiver = machines.world, machines.receiver()
    async with (
        serving(receiver) as server,
        bad_network("127.0.0.1", server) as proxy,
        await world.registry.register(lease("far", proxy.port)),
    ):
        await machines.step()
        await world.publisher.wait_committed(0, 1, 300)
        for name in ("STREAM_IDLE_TIMEOUT", "STAGE_TIMEOUT"):
            monkeypatch.setattr(replica_client, name, 1.0)
        proxy.hold()  # the stream of the first part gives up first, and closes the connection under the fetch of the second
        weights = await machines.step()
        await world.notice("replica far has not received its weights", "no progress after 0 of")
        for name in ("STREAM_IDLE_TIMEOUT", "STAGE_TIMEOUT"):
            monkeypatch.setattr(replica_client, name, 300.0)
        proxy.heal()
        await world.publisher.wait_committed(1, 1, 300)
        assert receiver.versions == [0, 1] and same(receiver.weights, weights)


async def test_a_part_with_other_bytes_is_never_served(machines: TwoMachines) -> None:
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


async def test_a_replica_that_joins_while_a_part_is_being_written_gets_the_version_before(machines: TwoMachines) -> None:
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
