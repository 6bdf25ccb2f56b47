"""Deltas and relays of versions of several parts, over real gRPC: after any fault, a replica ends with the bytes of a full push."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from redis.asyncio import Redis

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights.wire import MAX_FETCHES
from polyreme_trainer.weight_sync import part_server
from polyreme_trainer.weight_sync.deltas import Deltas, EncodedDelta
from polyreme_trainer.weight_sync.part_server import PartServer
from polyreme_trainer.weight_sync.version import Version
from support.part_machines import INTERVAL, NAMES, PARTS, Machines
from support.publishing import SPARSE, fall_behind, lose_delta, publishing, same, zeros
from support.receiver import Receiver, proxied, replica
from support.waiting import until

NBYTES = sum(layout.nbytes for layout in PARTS)
MACHINES = 3


class Recording(Receiver):
    """A receiver that notes the content of each call that brings it bytes from elsewhere, and of each that asks it for some."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id, NAMES)
        self.fetched: list[tuple[int, int, bool]] = []
        """Version, part, and whether it was a delta."""
        self.served: list[tuple[int, int, bool]] = []
        self.may_fetch = asyncio.Event()
        self.may_fetch.set()

    async def StageRelay(self, request: pb.StageRelayRequest, context: Any) -> pb.StageRelayResponse:
        delta = request.HasField("delta")
        manifest = request.delta.manifest if delta else request.manifest
        self.fetched.append((manifest.id.version, manifest.part, delta))
        await self.may_fetch.wait()
        return await super().StageRelay(request, context)

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:
        self.served.append((request.id.version, request.part, request.HasField("base")))
        await super().Fetch(request, context)


@pytest.fixture
def server() -> type[PartServer]:
    """The class of the servers of the other machines."""
    return PartServer


@pytest.fixture
async def machines(redis: Redis, redis_url: str, run_id: str, server: type[PartServer]) -> AsyncIterator[Machines]:
    async with publishing(redis, redis_url, run_id, PARTS[0], weights={"anchor_interval": INTERVAL}) as world:
        world.limits.reach_attempts = 10_000
        machines = Machines(world, server)
        yield machines
        machines.close()


def recording(machines: Machines) -> Recording:
    return Recording(machines.world.run.run_id)


async def step(machines: Machines, receivers: list[Recording], fraction: float = SPARSE, **options: Any) -> None:
    """Publishes a version and waits until all replicas serve it."""
    weights = await machines.step(fraction, **options)
    await machines.world.publisher.wait_committed(machines.version, len(receivers), 300)
    assert all(same(receiver.weights, weights) for receiver in receivers)


async def test_between_anchors_every_part_arrives_as_a_delta(machines: Machines) -> None:
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        for _ in range(7):
            await step(machines, [receiver])
    records = await machines.world.commits()
    assert [record["path"] for record in records] == ["stream", "delta", "delta", "delta", "stream", "delta", "delta"]
    assert {fetch for fetch in receiver.fetched if fetch[1]} == {
        (version, part, version % INTERVAL > 0) for version in range(7) for part in (1, 2)
    }
    for record in records:
        if record["path"] == "delta":
            assert 0 < record["bytes"] < NBYTES / 10 and 0 < record["density"] < 2 * SPARSE
            assert record["encode_seconds"] > 0 < record["apply_seconds"]
        else:
            assert record["bytes"] == NBYTES and "density" not in record


async def test_the_machines_send_each_part_once_whole_and_as_a_delta(machines: Machines) -> None:
    async with AsyncExitStack() as stack:
        receivers = [recording(machines) for _ in range(5)]
        for number, receiver in enumerate(receivers):
            await stack.enter_async_context(replica(machines.world.registry, f"r{number}", receiver))
        for version in range(3):
            await step(machines, receivers)
            records = [record for record in await machines.world.commits() if record["version"] == version]
            assert {record["path"] for record in records} == {"delta" if version else "stream"}
            sent = sum(record["bytes"] for record in records)
            assert sum(record.get("relayed_bytes", 0) for record in records) == 4 * sent
            for part in range(MACHINES):
                served = [each for receiver in receivers for each in receiver.served if each[:2] == (version, part)]
                assert len(served) >= 4 and {delta for *_, delta in served} == {version > 0}
            if version == 0:
                assert sent == NBYTES


async def test_a_part_that_changed_too_much_goes_whole_while_the_others_are_deltas(machines: Machines) -> None:
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        await step(machines, [receiver], dense=(1,))
        await step(machines, [receiver])
    assert {fetch for fetch in receiver.fetched if fetch[0]} == {(1, 1, False), (1, 2, True), (2, 1, True), (2, 2, True)}
    record = (await machines.world.commits())[1]
    share = PARTS[1].nbytes / NBYTES
    assert record["path"] == "delta" and PARTS[1].nbytes < record["bytes"] < PARTS[1].nbytes + NBYTES / 10
    assert share < record["density"] < share + 2 * SPARSE


async def test_a_replica_that_lags_receives_one_delta_of_every_part(machines: Machines) -> None:
    world = machines.world
    async with AsyncExitStack() as stack:
        slow, quick = recording(machines), recording(machines)
        for name, receiver in (("slow", slow), ("quick", quick)):
            await stack.enter_async_context(replica(world.registry, name, receiver))
        await step(machines, [slow, quick])
        weights = await fall_behind(slow, quick, lambda: machines.step(SPARSE))
        await world.publisher.wait_committed(3, 2, 300)
        assert same(slow.weights, weights) and slow.versions == [0, 1, 3]
        assert {fetch for fetch in slow.fetched if fetch[0] == 3 and fetch[1]} == {(3, 1, True), (3, 2, True)}


async def test_a_late_joiner_fetches_every_part_from_a_replica_and_then_gets_deltas(machines: Machines) -> None:
    async with AsyncExitStack() as stack:
        one, two = recording(machines), recording(machines)
        await stack.enter_async_context(replica(machines.world.registry, "one", one))
        await step(machines, [one])
        await step(machines, [one])
        await stack.enter_async_context(replica(machines.world.registry, "two", two))
        await machines.world.publisher.wait_committed(1, 2, 300)
        assert same(two.weights, machines.weights)
        assert sorted(one.served) == [(1, part, False) for part in range(MACHINES)]
        await step(machines, [one, two])
    record = next(record for record in await machines.world.commits() if (record["replica"], record["version"]) == ("two", 1))
    assert (record["bytes"], record["relayed_bytes"], record["source"], record["hops"]) == (0, NBYTES, "one", 2)


async def test_a_lost_delta_of_one_part_is_that_part_whole(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_delta(monkeypatch, 2, part=1)
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        for _ in range(4):
            await step(machines, [receiver])
    assert [each for each in sorted(receiver.fetched) if not each[2]] == [(0, 1, False), (0, 2, False), (2, 1, False)]


async def test_a_slot_that_is_overwritten_while_a_machine_compares_it_costs_the_delta(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Deltas._diff

    def overwritten(deltas: Deltas, before: Version, after: Version) -> Any:
        if (after.number, after.manifest.part) == (1, 1):
            arena = machines.arenas[1]
            arena.begin(before.slot)
            arena.slot_view(before.slot)[:] = bytes(PARTS[1].nbytes)
        return real(deltas, before, after)

    monkeypatch.setattr(Deltas, "_diff", overwritten)
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        await step(machines, [receiver])
    assert {each for each in receiver.fetched if each[0] == 1} == {(1, 1, False), (1, 2, True)}


class HeldServer(PartServer):
    may_answer: ClassVar[dict[int, threading.Event]]

    async def delta(self, request: Any) -> EncodedDelta | None:
        await asyncio.to_thread(self.may_answer[request.part].wait, 300)
        return await super().delta(request)


@pytest.mark.parametrize("server", [HeldServer])
async def test_slots_count_as_compared_until_every_machine_has_answered(machines: Machines) -> None:
    may_answer = HeldServer.may_answer = {part: threading.Event() for part in (1, 2)}
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        await machines.step(SPARSE)
        slots = machines.world.sync._slots
        await until(lambda: [len(slots._compared.get(part, ())) for part in may_answer] == [2, 2])
        may_answer[1].set()
        await until(lambda: not slots._compared[1])
        assert len(slots.compared) == 2 and slots.free() not in slots.compared
        may_answer[2].set()
        await machines.world.publisher.wait_committed(1, 1, 300)
        assert same(receiver.weights, machines.weights)
        await until(lambda: not slots.compared)


class SilentServer(PartServer):
    asked: ClassVar[list[int]]
    """The part of each request."""

    async def delta(self, request: Any) -> EncodedDelta | None:
        self.asked.append(request.part)
        await asyncio.Event().wait()
        return None


@pytest.mark.parametrize("server", [SilentServer])
async def test_a_machine_that_does_not_answer_sends_its_part_whole_and_is_not_asked_again(machines: Machines) -> None:
    asked = SilentServer.asked = []
    machines.world.limits.find_delta = 0.2
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        for _ in range(3):
            await step(machines, [receiver])
    assert sorted(asked) == [1, 2]
    assert not [each for each in receiver.fetched if each[2]]


class OtherServer(PartServer):
    async def delta(self, request: Any) -> EncodedDelta | None:
        found = await super().delta(request)
        assert found is not None
        first, *rest = found.delta.manifest.tensors
        changed = replace(found.delta.manifest, tensors=(replace(first, before=first.before ^ 1), *rest))
        return replace(found, delta=replace(found.delta, manifest=changed))


@pytest.mark.parametrize("server", [OtherServer])
async def test_a_delta_between_other_bytes_is_not_offered(machines: Machines) -> None:
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        await step(machines, [receiver])
    assert not [each for each in receiver.fetched if each[2]]
    assert not [text for text in await machines.world.notices() if "delta" in text]


async def test_a_replica_that_lost_its_bytes_receives_every_part_whole(machines: Machines) -> None:
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        receiver.swapper.staging.receiver.buffers.clear()  # the memory of an ended process
        await step(machines, [receiver])
        assert {each for each in receiver.fetched if each[0] == 1 and not each[2]} == {(1, 1, False), (1, 2, False)}
        await machines.world.notice("replica r cannot use a delta and receives part 1 of version 1 whole", "FAILED_PRECONDITION")
        await step(machines, [receiver])
    assert [record["path"] for record in await machines.world.commits()] == ["stream", "stream", "delta"]


async def test_a_damaged_delta_from_a_machine_is_followed_by_the_whole_part(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        monkeypatch.setattr(part_server, "encode_chunk", zeros(10_000))
        await step(machines, [receiver])
        for part in (1, 2):
            await machines.world.notice(f"replica r cannot use a delta and receives part {part} of version 1 whole", "DATA_LOSS")


async def test_a_failed_swap_rolls_back_and_is_repeated(machines: Machines) -> None:
    async with replica(machines.world.registry, "r", receiver := recording(machines)):
        await step(machines, [receiver])
        receiver.engine.broken_loads = 1
        await step(machines, [receiver])
        assert receiver.versions == [0, 0, 1]
        await step(machines, [receiver])
    assert [record["path"] for record in await machines.world.commits()] == ["stream", "delta", "delta"]


async def test_a_relay_that_dies_costs_a_fetch_from_elsewhere(machines: Machines) -> None:
    world = machines.world
    first, second = recording(machines), recording(machines)
    first.limits.chunk_bytes = 1000
    async with proxied(world.registry, "a", first) as proxy:
        await step(machines, [first])
        proxy.refuse_after_answers(NBYTES // 2)
        async with replica(world.registry, "b", second):
            await world.publisher.wait_committed(0, 2, 300)
            assert same(second.weights, machines.weights)
            await world.notice("replica b could not fetch weights from replica a", "UNAVAILABLE")
            record = next(record for record in await world.commits() if record["replica"] == "b")
            assert 0 < record["bytes"] < NBYTES
            assert not [text for text in await world.notices() if "quarantined" in text]
            proxy.heal()


async def test_a_replica_serves_all_parts_at_once(machines: Machines) -> None:
    """The limit of fetches from one replica holds for each part: there are more parts than fetches of one part."""
    assert MACHINES > MAX_FETCHES
    one, two = recording(machines), recording(machines)
    one.may_send.clear()
    async with replica(machines.world.registry, "one", one):
        await step(machines, [one])
        async with replica(machines.world.registry, "two", two):
            await until(lambda: len(one.served) == MACHINES)
            one.may_send.set()
            await machines.world.publisher.wait_committed(0, 2, 300)
            assert same(two.weights, machines.weights)
    record = next(record for record in await machines.world.commits() if record["replica"] == "two")
    assert (record["bytes"], record["relayed_bytes"]) == (0, NBYTES)


async def test_the_slot_of_a_whole_version_is_held_until_all_its_parts_have_arrived(machines: Machines) -> None:
    receiver = recording(machines)
    receiver.may_fetch.clear()
    async with replica(machines.world.registry, "r", receiver):
        first = await machines.step()
        await until(lambda: len(receiver.fetched) == MACHINES - 1 and 0 in receiver.swapper.staging._staged._parts)
        written = [arena.generation(0) for arena in machines.arenas]
        await machines.step(SPARSE)
        assert [arena.generation(0) for arena in machines.arenas] == written and machines.arenas[0].version(1)[1] == 1
        slots = machines.world.sync._slots
        await until(lambda: slots.newest == 1 and not slots.compared)
        assert slots.free() == 2
        receiver.may_fetch.set()
        await machines.world.publisher.wait_committed(1, 1, 300)
        assert receiver.versions == [0, 1] and same(receiver.weights, machines.weights) and not same(first, machines.weights)
        assert not slots.readers(0)
