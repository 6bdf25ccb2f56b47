"""Relays between replicas, over real gRPC: the trainer sends each version once, and replicas get it despite any fault of a relay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.net import rpc
from polyreme_rollout.weights import relay
from support.certificates import issue
from support.publishing import SPARSE, SPARSE_LAYOUT, World, far_publishing, publishing, same, zeros
from support.receiver import Receiver, lease, proxied, replica, serving
from support.waiting import until


@pytest.fixture
async def world(redis: Redis, redis_url: str, run_id: str) -> AsyncIterator[World]:
    async with far_publishing(redis, redis_url, run_id) as world:
        yield world


async def commits(world: World, version: int) -> dict[str, dict[str, Any]]:
    return {record["replica"]: record for record in await world.commits() if record["version"] == version}


async def test_the_trainer_sends_each_version_once_to_sixteen_replicas(world: World) -> None:
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(world.replica(f"r{i:02}")) for i in range(16)]
        for version in range(3):
            weights = await world.step(SPARSE)
            await world.publisher.wait_committed(version, 16, 300)
            assert all(same(receiver.weights, weights) for receiver in replicas)
            records = (await commits(world, version)).values()
            assert {record["path"] for record in records} == {"delta" if version else "stream"}
            sent = {record["bytes"] for record in records} - {0}
            assert sum(record["bytes"] for record in records) == sum(sent), "to one replica"
            assert sum(record.get("relayed_bytes", 0) for record in records) == 15 * sum(sent)
            assert [record["hops"] for record in records if "source" not in record] == [1]
            assert min(record["hops"] for record in records if "source" in record) == 2
    received = [receiver.metrics.received_bytes.labels("replica")._value.get() for receiver in replicas]
    assert sum(received) > 15 * SPARSE_LAYOUT.nbytes


async def test_a_late_joiner_fetches_from_a_replica_and_a_mapping_one_is_left_alone(world: World) -> None:
    async with world.replica("one") as one:
        await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        await world.step(SPARSE)
        await world.publisher.wait_committed(1, 1, 300)
        async with world.replica("two") as two:
            await world.publisher.wait_committed(1, 2, 300)
            assert same(two.weights, world.weights)
            assert same(one.weights, world.weights)
            assert "StageStream" not in two.calls
    record = (await commits(world, 1))["two"]
    assert (record["path"], record["bytes"], record["relayed_bytes"], record["source"]) == (
        "stream",
        0,
        SPARSE_LAYOUT.nbytes,
        "one",
    )


async def test_a_late_joiner_fetches_a_version_that_its_source_had_under_an_older_number(world: World) -> None:
    async with world.replica("one"):
        for version, fraction in enumerate((1.0, 0.0)):
            await world.step(fraction)
            await world.publisher.wait_committed(version, 1, 300)
        async with world.replica("two") as two:
            await world.publisher.wait_committed(1, 2, 300)
            assert same(two.weights, world.weights)
    record = (await commits(world, 1))["two"]
    assert (record["bytes"], record["relayed_bytes"], record["source"]) == (0, SPARSE_LAYOUT.nbytes, "one")


async def test_replicas_on_the_trainers_host_neither_fetch_nor_serve(redis: Redis, redis_url: str, run_id: str) -> None:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(publishing(redis, redis_url, run_id, SPARSE_LAYOUT))
        near = [await stack.enter_async_context(world.replica(f"near{i}")) for i in range(2)]
        far = [world.receiver() for _ in range(2)]
        for number, receiver in enumerate(far):
            receiver.maps = False
            await stack.enter_async_context(replica(world.registry, f"far{number}", receiver))
        for version in range(3):
            weights = await world.step(SPARSE)
            await world.publisher.wait_committed(version, 4, 300)
            assert all(same(receiver.weights, weights) for receiver in (*near, *far))
            records = await commits(world, version)
            assert [records[name]["path"] for name in ("near0", "near1")] == ["arena"] * 2
            assert sorted(records[name]["hops"] for name in ("far0", "far1")) == [1, 2]
        assert not {"Fetch", "StageRelay"} & {call for receiver in near for call in receiver.calls}


async def test_a_relay_that_sends_other_bytes_is_refused_and_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "encode_chunk", zeros())
    async with world.replica("one") as one, world.replica("two") as two:
        weights = await world.step()
        await world.publisher.wait_committed(0, 2, 300)
        assert same(one.weights, weights)
        assert same(two.weights, weights)
        await world.notice("could not fetch weights from replica", "DATA_LOSS: version 0: embed differs")
        assert {record["bytes"] for record in (await commits(world, 0)).values()} == {SPARSE_LAYOUT.nbytes}
        assert not [text for text in await world.notices() if "quarantined" in text]


async def test_a_relay_that_dies_costs_a_fetch_from_elsewhere(world: World) -> None:
    """The bytes that arrived are kept."""
    first = world.receiver()
    first.limits.chunk_bytes = 1000
    async with proxied(world.registry, "a", first) as proxy:
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        proxy.refuse_after_answers(SPARSE_LAYOUT.nbytes // 2)
        async with world.replica("b") as second:
            await world.publisher.wait_committed(0, 2, 300)
            assert same(second.weights, world.weights)
            await world.notice("replica b could not fetch weights from replica a", "UNAVAILABLE")
            record = (await commits(world, 0))["b"]
            assert (record["hops"], "source" in record) == (1, False)
            assert 0 < record["bytes"] <= SPARSE_LAYOUT.nbytes
            proxy.heal()


async def test_a_replica_that_cannot_reach_its_relay_receives_from_the_trainer(world: World) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(world.replica("a"))
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        receiver = world.receiver()
        receiver.reaches_replicas = False
        await stack.enter_async_context(replica(world.registry, "b", receiver))
        for version in range(3):
            await world.publisher.wait_committed(version, 2, 300)
            assert same(receiver.weights, world.weights)
            if version < 2:
                await world.step()
    assert len([text for text in await world.notices() if "could not fetch" in text]) == 1


async def test_a_relay_that_serves_enough_others_is_asked_again_by_the_next(world: World) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(world.replica("a"))
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        for name, most in (("b", 0), ("c", 2)):
            first.limits.max_fetches = most
            receiver = await stack.enter_async_context(world.replica(name))
            await world.publisher.wait_committed(0, 2 if name == "b" else 3, 300)
            assert same(receiver.weights, world.weights)
        records = await commits(world, 0)
        assert [records[name].get("source") for name in ("a", "b", "c")] == [None, None, "a"]
        assert not [text for text in await world.notices() if "could not fetch" in text]


async def test_a_fetch_under_another_term_changes_nothing(world: World) -> None:
    receiver = world.receiver()
    receiver.limits.offer = 0.05
    async with serving(receiver) as port, await world.registry.register(lease("a", port)):
        id = pb.VersionId(run_id=world.run.run_id, term=world.term + 1, version=0)
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await pb_grpc.WeightsServiceStub(channel).Fetch(pb.FetchRequest(id=id), timeout=300).read()
        weights = await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        assert same(receiver.weights, weights)


async def test_a_relay_that_sends_nothing_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("polyreme_rollout.weights.weights_service.send", silent)
    async with world.replica("a"):
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        b = world.receiver()
        b.limits.idle = 0.1
        async with replica(world.registry, "b", b):
            await world.publisher.wait_committed(0, 2, 300)
            assert same(b.weights, world.weights)
    await world.notice("replica b could not fetch weights from replica a", "no bytes within")


async def test_a_relay_that_moves_on_leaves_its_children_to_another_source(world: World) -> None:
    """A relay's next two versions overwrite the bytes that a child still fetches."""
    async with world.replica("a") as a:
        a.limits.offer = 0.05
        a.may_send.clear()
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        async with world.replica("b") as b:
            await until(lambda: "Fetch" in a.calls)
            for version in (1, 2, 3):
                await world.step()
                await until(lambda version=version: a.versions[-1] == version)
            a.may_send.set()
            await world.publisher.wait_committed(3, 2, 300)
            assert same(b.weights, world.weights)
            assert not [text for text in await world.notices() if "could not fetch" in text]


async def test_the_end_of_a_relay_in_the_middle_of_the_chain_loses_no_version(world: World) -> None:
    """The first replica has the version, the second one ends while it fetches it, and the third one waits for the second."""
    world.limits.reach_attempts = 1000
    world.limits.max_fetches = 1
    async with AsyncExitStack() as stack:
        a, b, c = (world.receiver() for _ in range(3))
        await stack.enter_async_context(replica(world.registry, "a", a))
        await world.step()
        await world.publisher.wait_committed(0, 1, 300)
        a.may_send.clear()
        b.may_send.clear()
        async with replica(world.registry, "b", b):
            await until(lambda: "Fetch" in a.calls)
            await stack.enter_async_context(replica(world.registry, "c", c))
            await until(lambda: "Fetch" in b.calls)
        a.may_send.set()
        await world.publisher.wait_committed(0, 2, 300)
        assert same(c.weights, world.weights)
        await world.notice("replica c could not fetch weights from replica b")
        assert not [text for text in await world.notices() if "quarantined" in text]


@pytest.mark.parametrize("tls", [False, True])
async def test_replicas_show_each_other_the_runs_token_and_certificates(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setenv("POLYREME_TEST_TOKEN", "s3cret-token")
    section = issue(tmp_path / "ours").section(token_env="POLYREME_TEST_TOKEN", mutual=True) if tls else {}
    section = section or {"token_env": "POLYREME_TEST_TOKEN"}
    security = SecurityConfig.model_validate(section)
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(publishing(redis, redis_url, run_id, SPARSE_LAYOUT, security=section))
        world.arena.unlink()
        receivers = [Receiver(world.run.run_id, ["embed", "norm"], shown) for shown in (security, security, None)]
        for number, receiver in enumerate(receivers):
            if number != 1:
                weights = await world.step()
            await world.publisher.wait_committed(world.version, number, 300)  # so that the next replica finds a source
            port = await stack.enter_async_context(serving(receiver, security=security))
            await stack.enter_async_context(await world.registry.register(lease(f"r{number}", port)))
            await world.publisher.wait_committed(world.version, number + 1, 300)
        assert all(same(receiver.weights, weights) for receiver in receivers)
        await world.notice("replica r2 could not fetch weights", "UNAVAILABLE" if tls else "UNAUTHENTICATED")
    assert not [text for text in await world.notices() if "could not fetch" in text and "replica r2 could" not in text]
