"""The memory that receives streams."""

import numpy as np

from polyreme.weights.delta import WeightDelta, diff
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest
from polyreme_rollout.weights.weight_receiver import WeightReceiver

Version = tuple[Manifest, memoryview]


def version(number: int, part: int, parts: int) -> Version:
    """A part whose numbers are 0, except the first ones."""
    layout = plan_manifest([TensorSpec("a", "F32", (1000,))], part=part, parts=parts)
    numbers = np.zeros(1000, np.float32)
    numbers[:number] = 1.0
    data = numbers.view(np.uint8).data
    return seal(layout.stamped("run", 1, number), data), data


async def bring(receiver: WeightReceiver, sent: Version) -> None:
    async with receiver.receive(sent[0]) as incoming:
        await incoming.add(0, sent[1])
        assert await incoming.finish()


async def bring_delta(receiver: WeightReceiver, old: Version, new: Version) -> WeightDelta:
    delta = diff(*old, *new)
    assert delta
    async with receiver.receive_delta(delta.manifest) as incoming:
        await incoming.add(0, memoryview(delta.payload))
        assert await incoming.finish()
    return delta


async def test_the_payload_of_a_delta_is_dropped_when_its_part_arrives_whole_or_no_longer_exists() -> None:
    receiver = WeightReceiver(set, lambda nonce: None)
    for part in range(2):
        await bring(receiver, version(0, part, 2))
        await bring_delta(receiver, version(0, part, 2), version(1, part, 2))
    assert receiver.payloads.keys() == {0, 1}
    await bring(receiver, version(2, 1, 2))
    assert receiver.payloads.keys() == {0}
    await bring_delta(receiver, version(2, 1, 2), version(3, 1, 2))
    await bring(receiver, version(4, 0, 1))
    assert not receiver.payloads


async def test_a_delta_from_the_served_version_is_applied_to_the_version_before_without_a_copy() -> None:
    served: set[bytes] = set()
    receiver = WeightReceiver(lambda: served, lambda nonce: None)
    versions = [version(number, 0, 1) for number in range(5)]
    await bring(receiver, versions[0])
    [first] = receiver.buffers[0]
    served = {first.arena.nonce}
    await bring_delta(receiver, versions[0], versions[1])  # there is no version before, so the base is copied
    [second] = [buffer for buffer in receiver.buffers[0] if buffer is not first]
    for number, (behind, base) in enumerate([(first, second), (second, first), (first, second)], start=1):
        served = {base.arena.nonce}
        kept = bytes(base.view)
        base.view[:] = bytes(len(base.view))  # a copy of it would fail its digests
        await bring_delta(receiver, versions[number], versions[number + 1])
        assert receiver.buffers[0] == [first, second]
        assert bytes(behind.view) == bytes(versions[number + 1][1])
        base.view[:] = kept


async def test_bytes_are_announced_before_they_are_overwritten() -> None:
    """Whoever has staged them must not commit them any more."""
    announced: list[bytes] = []
    receiver = WeightReceiver(set, announced.append)
    await bring(receiver, version(0, 0, 1))
    [buffer] = receiver.buffers[0]
    assert announced == []
    await bring(receiver, version(1, 0, 1))
    await bring_delta(receiver, version(1, 0, 1), version(2, 0, 1))
    assert announced == [buffer.arena.nonce] * 2
