"""Bytes that others read while they arrive."""

import asyncio

import pytest

from polyreme_rollout.weights.outgoing import Outgoing, OutgoingParts, PartId
from polyreme_rollout.weights.staged_parts import VersionId

PART = PartId(VersionId(1, 1), 0)


async def test_a_reader_waits_for_verified_bytes() -> None:
    outgoing = Outgoing(memoryview(b"abcdef"))
    outgoing.update(0, arriving=True)
    reading = asyncio.create_task(outgoing.read(0, 4, 0.0))
    await asyncio.sleep(0)
    assert not reading.done()
    outgoing.update(5, arriving=True)
    assert bytes(await reading) == b"abcd"
    assert bytes(await outgoing.read(4, 4, 0.0)) == b"e"


async def test_a_reader_does_not_wait_for_a_stream_that_has_ended() -> None:
    outgoing = Outgoing(memoryview(b"ab"))
    with pytest.raises(TimeoutError):
        await outgoing.read(0, 1, 0.0)


async def test_a_stream_that_ends_while_a_reader_waits_gives_it_a_deadline() -> None:
    outgoing = Outgoing(memoryview(b"ab"))
    outgoing.update(0, arriving=True)
    reading = asyncio.create_task(outgoing.read(0, 1, 0.0))
    await asyncio.sleep(0)
    outgoing.update(0, arriving=False)
    with pytest.raises(TimeoutError):
        await reading


async def test_a_reader_gets_nothing_of_memory_with_another_use() -> None:
    outgoing = Outgoing(memoryview(b"ab"), 2)
    outgoing.close()
    assert not await outgoing.read(0, 1, 0.0)


async def test_a_part_may_be_asked_for_before_it_is_offered_and_not_after_it_was_closed() -> None:
    parts, outgoing = OutgoingParts(), Outgoing(memoryview(b"ab"), 2)
    asking = asyncio.create_task(parts.get(PART, 300))
    await asyncio.sleep(0)
    parts.offer(PART, outgoing)
    assert await asking is outgoing
    outgoing.close()
    parts.offer(PartId(VersionId(1, 2), 0), Outgoing(memoryview(b"c")))
    assert await parts.get(PART, 0.0) is None
