"""The deltas of a learner's versions: combined for replicas that lag, dropped when their slots were overwritten."""

import asyncio
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from polyreme.weights import delta as deltas_module
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal, verify
from polyreme.weights.manifest import TensorSpec, plan_manifest
from polyreme_trainer.weight_sync import deltas
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.deltas import Deltas
from polyreme_trainer.weight_sync.version import Version

LAYOUT = plan_manifest([TensorSpec("a", "BF16", (20000,)), TensorSpec("b", "F32", (500,))])


class Learner:
    """Writes versions with few changes into an arena's slots, one after the other."""

    def __init__(self, anchor_interval: int = 100) -> None:
        self.arena = Arena.create(f"test-{uuid.uuid4().hex[:12]}", LAYOUT.nbytes)
        self.slots = ArenaSlots(3)
        self.deltas = Deltas(self.arena, anchor_interval, 2, self.slots.compare)
        self.rng = np.random.default_rng(0)
        self.bytes = np.frombuffer(self.rng.bytes(LAYOUT.nbytes), np.uint8).copy()
        self.images: list[bytes] = []

    def step(self, changed: int = 50, wanted: bool = True) -> Version:
        number = len(self.images)
        slot = number % 3
        self.bytes[self.rng.integers(0, LAYOUT.nbytes, changed)] ^= 1
        self.images.append(self.bytes.tobytes())
        self.arena.begin(slot)
        self.arena.slot_view(slot)[:] = self.images[-1]
        manifest = seal(LAYOUT.stamped("run", 1, number), self.arena.slot_view(slot))
        version = Version(manifest.to_proto(), slot, self.arena.complete(slot, number, 1))
        self.deltas.publish(version, wanted)
        return version

    async def arrives(self, base: Version, target: Version) -> bool | None:
        """Whether the delta turns one version's bytes into the other's; None without a delta."""
        encoded = await self.deltas.between(base.number, target.number)
        if encoded is None:
            return None
        shadow = bytearray(self.images[base.number])
        deltas_module.apply(encoded.delta.manifest, memoryview(encoded.delta.payload), memoryview(shadow))
        verify(encoded.delta.manifest.manifest, memoryview(shadow))
        return bytes(shadow) == self.images[target.number]


@pytest.fixture
def learner() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.deltas.close()
    learner.arena.close()


async def settled(learner: Learner) -> None:
    await asyncio.gather(*learner.deltas.links.values())


async def test_a_replica_that_lags_gets_one_delta_over_all_versions_in_between(learner: Learner) -> None:
    versions = []
    for _ in range(6):
        versions.append(learner.step())
        await settled(learner)
    assert [await learner.arrives(base, versions[-1]) for base in versions[:-1]] == [True] * 5
    assert await learner.arrives(versions[0], versions[3]) is None  # only the newest is ever sent


async def test_several_replicas_share_one_combination(learner: Learner) -> None:
    versions = []
    for _ in range(3):
        versions.append(learner.step())
        await settled(learner)
    first, second = await asyncio.gather(*(learner.deltas.between(0, 2) for _ in range(2)))
    assert first is second is not None


async def test_a_slot_overwritten_meanwhile_loses_its_delta_and_no_other(learner: Learner) -> None:
    versions = [learner.step() for _ in range(4)]  # version 3 takes the slot of version 0 before the comparison begins
    assert await learner.arrives(versions[0], versions[3]) is None
    assert await learner.arrives(versions[1], versions[3])


async def test_a_slot_overwritten_during_its_comparison_loses_its_delta(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diff(*arguments: object) -> object:
        learner.arena.begin(before.slot)  # training needs the slot
        return deltas_module.diff(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(deltas, "diff", diff)
    before, after = learner.step(), learner.step()
    assert await learner.arrives(before, after) is None


async def test_no_delta_spans_an_anchor() -> None:
    learner = Learner(anchor_interval=3)
    versions = []
    for _ in range(5):
        versions.append(learner.step())
        await settled(learner)
    assert await learner.arrives(versions[2], versions[4]) is None
    assert await learner.arrives(versions[3], versions[4])
    learner.deltas.close()
    learner.arena.close()


async def test_nothing_is_computed_while_no_replica_receives_streams(learner: Learner) -> None:
    before, after = learner.step(wanted=False), learner.step(wanted=False)
    assert not learner.deltas.links
    assert await learner.arrives(before, after) is None


async def test_old_deltas_beyond_half_a_version_are_forgotten(learner: Learner) -> None:
    versions = []
    for _ in range(12):
        versions.append(learner.step(changed=3000))
        await settled(learner)
    kept = [(await asyncio.shield(link)) for link in learner.deltas.links.values()]
    assert sum(len(link.delta.payload) for link in kept[:-1] if link) <= LAYOUT.nbytes / 2
    assert await learner.arrives(versions[0], versions[-1]) is None
    assert await learner.arrives(versions[-2], versions[-1])


async def test_slots_being_compared_are_given_out_last(learner: Learner) -> None:
    learner.step()
    version = learner.step()
    learner.slots.newest = version.slot
    await asyncio.sleep(0)
    assert learner.slots.compared == {0, 1}
    assert learner.slots.free() == 2
    await settled(learner)
    assert not learner.slots.compared
    assert learner.slots.free() == 0
