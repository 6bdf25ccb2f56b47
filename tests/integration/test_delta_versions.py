"""Versions as deltas, over real gRPC: after any fault, a replica ends with the bytes of a full push."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.weights.delta import diff
from polyreme.weights.digest import seal
from polyreme_rollout.weights.weight_receiver import BaseError
from polyreme_trainer.weight_sync import replica_client
from polyreme_trainer.weight_sync.publisher import Publisher
from support.publishing import SPARSE, SPARSE_LAYOUT, World, fall_behind, far_publishing, lose_delta, same, zeros
from support.receiver import lease, proxied, serving


@pytest.fixture
async def world(redis: Redis, redis_url: str, run_id: str) -> AsyncIterator[World]:
    async with far_publishing(redis, redis_url, run_id) as world:
        yield world


async def paths(world: World) -> list[str]:
    return [record["path"] for record in await world.commits()]


async def test_between_anchors_a_streamed_replica_receives_deltas(world: World) -> None:
    async with world.replica("far") as far:
        for version in range(7):
            weights = await world.step(SPARSE)
            await world.publisher.wait_committed(version, 1, 300)
            assert same(far.weights, weights)
            assert bool(far.swapper.staging.receiver.payloads) == (version % 4 > 0), "memory for deltas only"
    assert await paths(world) == ["stream", "delta", "delta", "delta", "stream", "delta", "delta"]
    for record in await world.commits():
        if record["path"] == "delta":
            assert 0 < record["bytes"] < SPARSE_LAYOUT.nbytes / 10
            assert 0 < record["density"] < 2 * SPARSE
            assert record["encode_seconds"] > 0 < record["apply_seconds"]
        else:
            assert record["bytes"] == SPARSE_LAYOUT.nbytes
            assert "density" not in record


async def test_versions_without_changes_are_committed(world: World) -> None:
    async with world.replica("far") as far:
        for version, fraction in enumerate((1.0, 0.0, 0.0)):
            weights = await world.step(fraction)
            await world.publisher.wait_committed(version, 1, 300)
            assert same(far.weights, weights)
        assert far.versions == [0, 1, 2]
    assert await paths(world) == ["stream", "delta", "delta"]
    assert not [text for text in await world.notices() if "cannot use" in text]


async def test_the_same_delta_under_a_new_term_is_committed(world: World, redis_url: str) -> None:
    """A resumed learner reproduces the same bytes."""
    async with world.replica("far") as far:
        trained = []
        for version in range(2):
            trained.append(await world.step(SPARSE))
            await world.publisher.wait_committed(version, 1, 300)
        world.publisher.close()
        world.log = ExperienceLog(world.run)
        world.publisher = Publisher(redis_url, world.run.run_id, await world.log.take(Writer.LEARNER), world.arena)
        world.publisher.start()
        world.version = -1
        for version in range(2):
            world.weights = trained[version]
            await world.step(0.0)
            await world.publisher.wait_committed(version, 1, 300)
            assert same(far.weights, trained[version])
        assert far.versions == [0, 1, 0, 1]
    assert await paths(world) == ["stream", "delta"] * 2


async def test_a_replica_that_lags_receives_one_delta(world: World) -> None:
    async with world.replica("far") as far, world.replica("quick") as quick:
        await world.step(SPARSE)
        await world.publisher.wait_committed(0, 2, 300)
        weights = await fall_behind(far, quick, lambda: world.step(SPARSE))
        await world.publisher.wait_committed(3, 2, 300)
        assert same(far.weights, weights)
        assert far.versions == [0, 1, 3]
    records = {record["version"]: record for record in await world.commits() if record["replica"] == "far"}
    assert records[3]["path"] == "delta"
    assert records[1]["density"] < records[3]["density"] < 4 * SPARSE


async def test_a_version_that_changed_too_much_is_sent_whole(world: World) -> None:
    async with world.replica("far") as far:
        for version, fraction in enumerate((1.0, 1.0, SPARSE)):
            weights = await world.step(fraction)
            await world.publisher.wait_committed(version, 1, 300)
            assert same(far.weights, weights)
    assert await paths(world) == ["stream", "stream", "delta"]


async def test_a_late_joiner_receives_a_whole_version_and_then_deltas(world: World) -> None:
    async with world.replica("one") as one:
        for version in range(2):
            await world.step(SPARSE)
            await world.publisher.wait_committed(version, 1, 300)
        async with world.replica("two") as two:
            await world.publisher.wait_committed(1, 2, 300)
            assert same(two.weights, world.weights)
            weights = await world.step(SPARSE)
            await world.publisher.wait_committed(2, 2, 300)
            assert same(one.weights, weights)
            assert same(two.weights, weights)
    assert {(record["replica"], record["version"]): record["path"] for record in await world.commits()} == {
        **{("one", 0): "stream", ("one", 1): "delta", ("one", 2): "delta"},
        **{("two", 1): "stream", ("two", 2): "delta"},
    }


async def test_a_restarted_replica_refuses_the_delta_and_receives_the_whole_version(world: World) -> None:
    receiver = world.receiver()
    async with serving(receiver) as port, await world.registry.register(lease("far", port)):
        await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        receiver.swapper.staging.receiver.buffers.clear()  # the memory of an ended process
        weights = await world.step(SPARSE)
        await world.publisher.wait_committed(1, 1, 300)
        assert same(receiver.weights, weights)
    assert await paths(world) == ["stream", "stream"]
    await world.notice("replica far cannot use a delta", "FAILED_PRECONDITION", "as the base")


async def test_a_damaged_delta_is_refused_and_the_whole_version_follows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.replica("far") as far:
        await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        monkeypatch.setattr(replica_client, "encode_chunk", zeros(SPARSE_LAYOUT.nbytes / 2))
        weights = await world.step(SPARSE)
        await world.publisher.wait_committed(1, 1, 300)
        assert same(far.weights, weights)
        assert far.versions == [0, 1]
    assert await paths(world) == ["stream", "stream"]
    await world.notice("replica far cannot use a delta", "DATA_LOSS")


async def test_a_delta_from_other_bytes_of_the_same_version_is_refused(world: World) -> None:
    async with world.replica("far") as far:
        weights = await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        rng = np.random.default_rng(1)
        other = bytearray(rng.bytes(SPARSE_LAYOUT.nbytes))
        changed = bytearray(other)
        changed[0] ^= 1
        before, after = (
            seal(SPARSE_LAYOUT.stamped(world.run.run_id, world.term, version), memoryview(data))
            for version, data in ((0, other), (1, changed))
        )
        delta = diff(before, memoryview(other), after, memoryview(changed))
        assert delta is not None
        with pytest.raises(BaseError, match=r"expected version 0 .* as the base; found other bytes"):
            async with far.swapper.staging.receiver.receive_delta(delta.manifest):
                pass
        assert same(far.weights, weights)


async def test_a_base_that_was_damaged_in_memory_is_found_out_and_the_whole_version_follows(world: World) -> None:
    async with world.replica("far") as far:
        await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        [buffer] = far.swapper.staging.receiver.buffers[0]
        buffer.view[0] ^= 1
        weights = await world.step(SPARSE)
        await world.publisher.wait_committed(1, 1, 300)
        assert same(far.weights, weights)
    assert await paths(world) == ["stream", "stream"]
    await world.notice("replica far cannot use a delta", "DATA_LOSS")


async def test_a_failed_swap_of_a_delta_rolls_back_and_is_repeated(world: World) -> None:
    async with world.replica("far") as far:
        first = await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        after_load: list[bool] = []
        real = far.engine.load

        async def load(sources: Any) -> Any:
            try:
                return await real(sources)
            finally:
                after_load.append(same(far.weights, first))

        far.engine.load = load  # type: ignore[method-assign]
        far.engine.broken_loads = 1
        weights = await world.step(SPARSE)
        await world.publisher.wait_committed(1, 1, 300)
        assert after_load == [False, True, False]  # half of version 1, version 0 again, version 1
        assert same(far.weights, weights)
    assert (await paths(world))[-1] == "delta"


async def test_a_broken_connection_in_a_delta_is_retried(world: World) -> None:
    world.limits.reach_attempts = 1000
    world.limits.chunk_bytes = 16
    receiver = world.receiver()
    async with proxied(world.registry, "far", receiver) as proxy:
        await world.step(SPARSE)
        await world.publisher.wait_committed(0, 1, 300)
        proxy.refuse_after(300)  # after the headers, before the last of the weights
        weights = await world.step(SPARSE)
        await world.notice("replica far has not received its weights", "version 1: UNAVAILABLE")
        proxy.heal()
        await world.publisher.wait_committed(1, 1, 300)
        assert same(receiver.weights, weights)
    assert await paths(world) == ["stream", "delta"]


async def test_a_lost_delta_is_a_whole_version(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_delta(monkeypatch, 2)
    async with world.replica("far") as far:
        for version in range(4):
            weights = await world.step(SPARSE)
            await world.publisher.wait_committed(version, 1, 300)
            assert same(far.weights, weights)
    assert await paths(world) == ["stream", "delta", "stream", "delta"]
