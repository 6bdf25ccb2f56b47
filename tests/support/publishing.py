"""A running publisher: a run with a learner that writes random weights, and replicas that receive them."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from polyreme.config.load import parse_config
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.process.backoff import Backoff
from polyreme.weights.arena import Arena, ArenaError
from polyreme.weights.canary import Canary
from polyreme.weights.delta import WeightDelta
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme.weights.wire import encode_chunk
from polyreme_trainer.weight_sync.deltas import Deltas
from polyreme_trainer.weight_sync.publisher import Publisher
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.replica_client import ReplicaClient
from polyreme_trainer.weight_sync.replica_sync import ReplicaSync
from polyreme_trainer.weight_sync.version import Version
from support.receiver import Receiver, replica
from support.waiting import until

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

Weights = dict[str, np.ndarray]
"""Tensors by name."""


@dataclass
class World:
    """A run with a learner that publishes random weights."""

    run: Run
    log: ExperienceLog
    registry: Registry
    arena: Arena
    limits: PushLimits
    publisher: Publisher
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    version: int = -1
    layout: Manifest = LAYOUT
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    async def step(
        self, fraction: float = 1.0, canary: Callable[[dict[str, np.ndarray]], Canary] | None = None
    ) -> dict[str, np.ndarray]:
        """Writes and publishes the next version, as the learner does. Returns its tensors. `fraction` of the elements get random bits."""
        self.version += 1
        slot = await self.publisher.acquire_slot(300)
        self.arena.begin(slot)
        views = tensor_views(self.layout, self.arena.slot_view(slot))
        for name, view in views.items():
            if name != "head":
                before = self.weights.get(name, view)
                noise = np.frombuffer(self.rng.bytes(view.nbytes), view.dtype).reshape(view.shape)
                view[...] = np.where(self.rng.random(view.shape) < fraction, noise, before)
        self.weights = weights = {name: view.copy() for name, view in views.items()}
        generation = self.arena.complete(slot, self.version, self.term)
        self.publisher.publish(self.manifest(), slot, generation, canary(weights) if canary else None)
        return weights

    def manifest(self) -> Manifest:
        return self.layout.stamped(self.run.run_id, self.term, self.version)

    @property
    def term(self) -> int:
        assert self.log.term is not None
        return self.log.term.counter

    @property
    def sync(self) -> ReplicaSync:
        """The running publisher's view of its replicas."""
        assert self.publisher._connected is not None
        return self.publisher._connected.sync

    def receiver(self, **swaps: float) -> Receiver:
        return Receiver(self.run.run_id, ["embed", "norm"], None, **swaps)

    def replica(self, name: str) -> AbstractAsyncContextManager[Receiver]:
        return replica(self.registry, name, self.receiver())

    async def notice(self, *words: str) -> str:
        """Waits for the first notice that contains all these words."""
        async with asyncio.timeout(300):
            while True:
                for text in await self.notices():
                    if all(word in text for word in words):
                        return text
                await asyncio.sleep(0.01)

    async def notices(self) -> list[str]:
        return [record["text"] for record in await self._records("notice")]

    async def commits(self) -> list[dict[str, Any]]:
        return await self._records("commit")

    async def _records(self, kind: str) -> list[dict[str, Any]]:
        return [record for _, record in await self.run.records("0", 0) if record["kind"] == kind]


def push_soon() -> PushLimits:
    """The limits of a publisher that finds replicas and retries pushes without the pauses of a real run."""
    return PushLimits(lease_check=0.02, backoff=Backoff(first=0.01, longest=0.05))


@asynccontextmanager
async def publishing(
    redis: Redis,
    redis_url: str,
    run_id: str,
    layout: Manifest = LAYOUT,
    client: type[ReplicaClient] = ReplicaClient,
    **config: Any,
) -> AsyncIterator[World]:
    """A run whose publisher has started. `client`: of each replica."""
    run = await Run.create(redis, run_id, parse_config({**CONFIG, **config}, "test"), {})
    log = ExperienceLog(run)
    term = await log.take(Writer.LEARNER)
    arena = Arena.create(run.run_id, layout.nbytes)
    limits = push_soon()
    publisher = Publisher(redis_url, run.run_id, term, arena, limits, client)
    publisher.start()
    yield World(run, log, Registry(run), arena, limits, publisher, layout=layout)
    publisher.close()
    arena.close()
    assert not arena.path.exists()


SPARSE_LAYOUT = plan_manifest([TensorSpec("embed", "BF16", (400, 30)), TensorSpec("norm", "F32", (33,))], {"head": "embed"})
SPARSE = 0.01
"""A fraction of changed elements for which a version of SPARSE_LAYOUT is sent as a delta."""


@asynccontextmanager
async def far_publishing(redis: Redis, redis_url: str, run_id: str) -> AsyncIterator[World]:
    """A learner on a different host from its replicas. Every fourth version is an anchor."""
    async with publishing(redis, redis_url, run_id, SPARSE_LAYOUT, weights={"anchor_interval": 4}) as world:
        world.arena.unlink()
        yield world


async def fall_behind(slow: Receiver, quick: Receiver, step: Callable[[], Awaitable[Weights]]) -> Weights:
    """Publishes versions 1, 2 and 3 by `step`. `quick` serves each of them, while `slow` still loads the first.

    Returns the tensors of version 3.
    """

    async def served(version: int) -> None:
        await until(lambda: quick.versions[-1] == version)

    slow.engine.may_load.clear()
    for version in (1, 2, 3):
        weights = await step()
        await served(version)
        if version == 1:
            await until(lambda: slow.calls.count("Commit") == 2)
    slow.engine.may_load.set()
    return weights


def lose_delta(monkeypatch: pytest.MonkeyPatch, version: int, part: int = 0) -> None:
    """Makes the delta to one version of a part fail, as when one of its slots is overwritten."""
    real = Deltas._diff

    def lost(deltas: Deltas, before: Version, after: Version) -> WeightDelta | None:
        if (after.number, after.manifest.part) == (version, part):
            raise ArenaError("overwritten")
        return real(deltas, before, after)

    monkeypatch.setattr(Deltas, "_diff", lost)


def zeros(longest: float = math.inf) -> Callable[[int, memoryview], bytes]:
    """An `encode_chunk` that replaces the data of chunks of at most `longest` bytes by zeros."""
    return lambda offset, data: encode_chunk(offset, memoryview(bytes(len(data))) if len(data) <= longest else data)


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)
