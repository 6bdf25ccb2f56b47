"""The canary of each version: a replica with different results serves nothing, and reports why."""

from dataclasses import replace

import numpy as np

from polyreme.weights.canary import Canary
from polyreme_rollout.weights.swap_state import SwapState
from polyreme_rollout.weights.weight_swap import FAILURES_TO_QUARANTINE
from support.publishing import World, same
from support.receiver import replica, scores
from support.waiting import until

IDS = (3, 1, 4, 1, 5)


def right(weights: dict[str, np.ndarray]) -> Canary:
    return Canary(IDS, tuple(scores(weights, IDS)), 1e-6)


def wrong(weights: dict[str, np.ndarray]) -> Canary:
    return replace(right(weights), logprobs=(0.0, 0.0, 0.0, -9.0))


async def test_a_replica_that_computes_the_version_takes_traffic(world: World) -> None:
    async with world.replica("near") as near:
        for version in range(3):
            weights = await world.step(canary=right)
            await world.publisher.wait_committed(version, 1, 300)
            assert same(near.weights, weights)
    records = await world.commits()
    assert [record["canary_difference"] < 1e-6 for record in records] == [True] * 3


async def test_a_replica_that_computes_something_else_leaves_rotation_and_says_why(world: World) -> None:
    async with world.replica("near") as near:
        await world.step(canary=right)
        await world.publisher.wait_committed(0, 1, 300)
        await world.step(canary=wrong)
        await world.notice("replica near", "quarantined: it failed 3 times", "version 1 failed its canary", "nothing is served")
        assert near.swapper.version is None
        assert near.swapper.failures == FAILURES_TO_QUARANTINE


async def test_it_returns_with_a_load_that_passes(world: World) -> None:
    async with world.replica("near") as near:
        await world.step(canary=right)
        await world.publisher.wait_committed(0, 1, 300)
        near.engine.stale_loads = 1  # this load silently keeps a tensor of the previous version
        weights = await world.step(canary=right)
        await world.publisher.wait_committed(1, 1, 300)
        assert near.engine.stale_loads == 0
        assert same(near.weights, weights)
        assert near.swapper.failures == 0


async def test_calls_wait_for_the_canary(world: World) -> None:
    async with world.replica("near") as near:
        near.engine.has_place.clear()
        await world.step(canary=right)
        await until(lambda: bool(near.versions))  # loaded, but not yet compared
        assert near.swapper.state is SwapState.CHECKING
        assert near.swapper.version is None
        near.engine.has_place.set()
        await world.publisher.wait_committed(0, 1, 300)
        assert await near.swapper.steady_version() == 0


async def test_an_engine_without_an_answer_serves_nothing(world: World) -> None:
    async with replica(world.registry, "near", world.receiver(canary_seconds=0.05)) as near:
        near.engine.has_place.clear()
        await world.step(canary=right)
        await world.notice(
            "replica near",
            "version 0 failed its canary",
            "expected the engine's answer within 0.05 s; found none",
            "nothing is served",
        )
        assert near.swapper.version is None
