"""Versions by stream, over real gRPC into real shared memory: refusals, broken streams and rollbacks."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.api.v1 import weights_pb2_grpc as pb_grpc
from polyreme.net import rpc
from polyreme.weights import arena as arena_module
from polyreme.weights.arena import Arena, ArenaError
from polyreme.weights.assembly import Assembly
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme.weights.wire import STAGE_STREAM, encode_chunk, encode_manifest
from support.receiver import Receiver, serving
from support.waiting import until

SPECS = {"a": (300, 7), "b": (5,), "c": (1000, 11)}
HALVES = (("a", "b"), ("c",))


class Sent:
    """A version of random weights, in one part or two."""

    def __init__(
        self, version: int, term: int = 1, parts: tuple[tuple[str, ...], ...] = (tuple(SPECS),), seed: int | None = None
    ):
        rng = np.random.default_rng(version if seed is None else seed)
        self.weights = {name: rng.normal(size=shape).astype("<f4") for name, shape in SPECS.items()}
        self.parts: list[tuple[Manifest, bytes]] = []
        for number, names in enumerate(parts):
            layout = plan_manifest([TensorSpec(name, "F32", SPECS[name]) for name in names], part=number, parts=len(parts))
            data = memoryview(bytearray(layout.nbytes))
            for name, view in tensor_views(layout, data).items():
                view[...] = self.weights[name]
            self.parts.append((seal(layout.stamped("run", term, version), data), bytes(data)))
        self.id = pb.VersionId(run_id="run", term=term, version=version)


class Wire:
    """A learner that may send any message."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel, self.stub = channel, pb_grpc.WeightsServiceStub(channel)

    def call(self) -> Any:
        return self.channel.stream_stream(STAGE_STREAM, response_deserializer=pb.StageStreamResponse.FromString)(timeout=300)

    async def begin(self, manifest: Manifest) -> tuple[Any, int]:
        """Opens a stream. Returns it and the offset at which it must begin."""
        call = self.call()
        await call.write(encode_manifest(manifest.to_proto()))
        answer = await call.read()
        assert answer.WhichOneof("content") == "begin_at"
        return call, answer.begin_at

    async def stage(self, part: tuple[Manifest, bytes], chunk: int = 1000) -> int:
        """Streams a part. Returns the offset at which it began."""
        manifest, data = part
        call, begin = await self.begin(manifest)
        try:
            for offset in range(begin, len(data), chunk):
                await call.write(encode_chunk(offset, memoryview(data)[offset : offset + chunk]))
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await asyncio.sleep(0.05)
        assert (await call.read()).WhichOneof("content") == "staged"
        return begin

    async def commit(self, id: pb.VersionId) -> pb.CommitResponse:
        return await self.stub.Commit(pb.CommitRequest(id=id), timeout=300)

    async def push(self, sent: Sent) -> None:
        for part in sent.parts:
            await self.stage(part)
        await self.commit(sent.id)

    async def refused(self, messages: Iterable[bytes]) -> tuple[str, str]:
        """Code and text of the status that ends a stream of these messages."""
        call = self.call()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            try:
                for message in messages:
                    await call.write(message)
                await call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it has ended already
                await asyncio.sleep(0.05)
            while await call.read() is not grpc.aio.EOF:
                pass
        return refusal.value.code().name, str(refusal.value.details())


@asynccontextmanager
async def world() -> AsyncIterator[tuple[Receiver, Wire]]:
    receiver = Receiver("run", list(SPECS))
    async with serving(receiver) as port, rpc.connect(f"127.0.0.1:{port}") as channel:
        yield receiver, Wire(channel)


def same(receiver: Receiver, sent: Sent) -> bool:
    return all(np.array_equal(receiver.weights[name], array) for name, array in sent.weights.items())


def private_arenas() -> int:
    """Open arenas without a name in this process."""
    gc.collect()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = {os.readlink(link) for link in links if os.path.islink(link)}
    return sum(file.startswith(f"{arena_module.SHARED_MEMORY}/#") for file in files)


async def test_versions_by_stream_are_served_to_the_byte_and_take_two_buffers() -> None:
    before = private_arenas()
    async with world() as (receiver, wire):
        for version in range(6):
            sent = Sent(version)
            await wire.push(sent)
            assert same(receiver, sent)
            assert private_arenas() == before + min(2, version + 1)
        assert receiver.versions == [*range(6)]
    del receiver, wire
    assert private_arenas() == before


async def test_a_version_of_two_parts_comes_in_any_order_and_from_arena_and_stream() -> None:
    async with world() as (receiver, wire):
        one = Sent(1, parts=HALVES)
        await wire.stage(one.parts[1])
        with pytest.raises(grpc.aio.AioRpcError, match=r"parts \[0\] are missing"):
            await wire.commit(one.id)
        await wire.stage(one.parts[0])
        await wire.commit(one.id)
        assert same(receiver, one)
        two = Sent(2, parts=HALVES)
        manifest, data = two.parts[0]
        arena = Arena.create(f"test-{uuid.uuid4().hex[:12]}", manifest.nbytes)
        arena.begin(0)
        arena.slot_view(0)[:] = data
        generation = arena.complete(0, 2, 1)
        staging = pb.StageArenaRequest(manifest=manifest.to_proto(), arena_path=str(arena.path), slot=0, generation=generation)
        await asyncio.gather(wire.stage(two.parts[1]), wire.stub.StageArena(staging, timeout=300))
        await wire.commit(two.id)
        arena.close()
        assert same(receiver, two)


async def test_what_contradicts_the_manifest_is_refused_and_stages_nothing() -> None:
    sent = Sent(1)
    manifest, data = sent.parts[0]
    head = encode_manifest(manifest.to_proto())
    size = manifest.nbytes
    whole = encode_chunk(0, memoryview(data))
    wrong = bytearray(data)
    wrong[-1] ^= 1
    lying = manifest.to_proto()
    lying.nbytes += 64
    unaligned = manifest.to_proto()
    unaligned.tensors[1].offset += 4
    cases: list[tuple[list[bytes], str, str]] = [
        ([], "INVALID_ARGUMENT", "manifest first"),
        ([whole], "INVALID_ARGUMENT", "manifest first"),
        ([b"\xff\xff\xff"], "INVALID_ARGUMENT", "other bytes"),
        ([encode_manifest(lying)], "INVALID_ARGUMENT", "consistent manifest"),
        ([encode_manifest(unaligned)], "INVALID_ARGUMENT", "consistent manifest"),
        ([head, head], "INVALID_ARGUMENT", "found a manifest"),
        ([head], "INVALID_ARGUMENT", f"expected {size} bytes; the stream ended after 0"),
        ([head, encode_chunk(4, memoryview(data)[4:])], "INVALID_ARGUMENT", "expected bytes from 0 on"),
        ([head, encode_chunk(0, memoryview(data + b"x"))], "INVALID_ARGUMENT", f"up to {size}; found {size + 1} from 0 on"),
        ([head, pb.StageStreamRequest(offset=0).SerializeToString()], "INVALID_ARGUMENT", "1 to 8388608 bytes"),
        ([head, encode_chunk(0, memoryview(wrong))], "DATA_LOSS", "version 1: c differs"),
        ([head, whole, encode_chunk(size, memoryview(b"x"))], "INVALID_ARGUMENT", "found 1 from"),
    ]
    for messages, code, text in cases:
        async with world() as (receiver, wire):
            found = await wire.refused(messages)
            assert found[0] == code, found
            assert text in found[1]
            with pytest.raises(grpc.aio.AioRpcError, match="found nothing"):
                await wire.commit(sent.id)
            await wire.push(sent)
            assert same(receiver, sent)


async def test_a_stale_term_and_another_run_are_refused() -> None:
    async with world() as (receiver, wire):
        sent = Sent(1)
        manifest = sent.parts[0][0].to_proto()
        receiver.term = 2
        code, text = await wire.refused([encode_manifest(manifest)])
        assert (code, "found 1" in text) == ("ABORTED", True)
        manifest.id.run_id = "other"
        assert (await wire.refused([encode_manifest(manifest)]))[0] == "INVALID_ARGUMENT"


async def test_a_learner_taken_over_in_mid_stream_stages_nothing() -> None:
    async with world() as (receiver, wire):
        manifest, data = Sent(1).parts[0]
        call, _ = await wire.begin(manifest)
        await call.write(encode_chunk(0, memoryview(data)))
        receiver.term = 2
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="ABORTED"):
            await call.read()


async def test_a_broken_stream_stages_nothing_and_the_next_one_continues_it() -> None:
    async with world() as (receiver, wire):
        zero, one = Sent(0), Sent(1)
        await wire.push(zero)
        manifest, data = one.parts[0]
        call, begin = await wire.begin(manifest)
        assert begin == 0
        await call.write(encode_chunk(0, memoryview(data)[:20_000]))
        buffers = receiver.swapper.staging.receiver.buffers[0]
        await until(lambda: any(buffer.arrival.position == 20_000 for buffer in buffers))
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="version 1 of term 1 to be staged"):
            await wire.commit(one.id)
        assert receiver.versions == [0]
        assert await wire.stage(one.parts[0]) == 20_000
        await wire.commit(one.id)
        assert same(receiver, one)
        assert await wire.stage(one.parts[0]) == len(data), "what is there whole is not sent again"
        two = Sent(2, term=2, seed=1)
        assert await wire.stage(two.parts[0]) == len(data), "the same bytes of another version neither"
        await wire.commit(two.id)
        assert same(receiver, two)


async def test_bytes_that_proved_wrong_are_not_gone_on_from() -> None:
    async with world() as (receiver, wire):
        for sent, size in ((Sent(1), 9000), (Sent(2), 50_000)):
            manifest, data = sent.parts[0]
            wrong = bytearray(data)
            wrong[0] ^= 1
            messages = [encode_manifest(manifest.to_proto()), encode_chunk(0, memoryview(wrong)[:size])]
            assert (await wire.refused(messages))[0] == "DATA_LOSS"
            assert await wire.stage(sent.parts[0]) == 0
            await wire.commit(sent.id)
            assert same(receiver, sent)


async def test_a_newer_stream_ends_an_older_one_of_the_same_part() -> None:
    async with world() as (receiver, wire):
        old, new = Sent(1), Sent(2)
        dead, _ = await wire.begin(old.parts[0][0])  # as if its connection were lost without notice
        await wire.push(new)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await dead.read()
        assert ended.value.code() == grpc.StatusCode.CANCELLED
        assert "newer stream of part 0" in str(ended.value.details())
        assert same(receiver, new)


async def test_silence_ends_a_stream() -> None:
    async with world() as (receiver, wire):
        receiver.limits.stream_idle = 0.1
        manifest, data = Sent(1).parts[0]
        call, _ = await wire.begin(manifest)
        await call.write(encode_chunk(0, memoryview(data)[:100]))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert (ended.value.code(), "within 0.1 s" in ended.value.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


async def test_missing_memory_is_reported_before_any_byte_is_sent() -> None:
    room = os.statvfs(arena_module.SHARED_MEMORY)
    rows = room.f_blocks * room.f_frsize // 1024 + 1
    layout = plan_manifest([TensorSpec("a", "U8", (rows, 1024))])
    async with world() as (receiver, wire):
        manifest = layout.stamped("run", 1, 1).to_proto.__self__
        tensor = pb.TensorEntry(name="a", dtype="U8", shape=(rows, 1024), offset=0, nbytes=rows * 1024, digest=1)
        huge = pb.Manifest(id=Sent(1).id, part=0, parts=1, tensors=[tensor], nbytes=manifest.nbytes)
        code, text = await wire.refused([encode_manifest(huge)])
        assert code == "RESOURCE_EXHAUSTED"
        assert "of shared memory for the weights" in text
        assert "shm_size" in text
        await wire.push(Sent(1))
        assert receiver.versions == [1]


async def test_a_failed_load_goes_back_to_the_streamed_version_before() -> None:
    async with world() as (receiver, wire):
        one, two, three = Sent(1), Sent(2), Sent(3)
        await wire.push(one)
        await wire.push(two)
        await wire.stage(three.parts[0])
        receiver.engine.broken_loads = 1
        with pytest.raises(grpc.aio.AioRpcError, match="version 2 is served again"):
            await wire.commit(three.id)
        assert same(receiver, two)
        assert await wire.stage(three.parts[0]) == len(three.parts[0][1])
        await wire.commit(three.id)
        assert same(receiver, three)
        assert receiver.versions == [1, 2, 2, 3]


async def test_what_the_engine_is_loading_is_not_written() -> None:
    async with world() as (receiver, wire):
        one, two, three = Sent(1), Sent(2), Sent(3)
        await wire.push(one)
        await wire.stage(two.parts[0])
        receiver.engine.may_load.clear()
        committing = asyncio.ensure_future(wire.commit(two.id))
        async with asyncio.timeout(300):
            while not receiver.engine.paused:  # noqa: ASYNC110 - the engine is the server's
                await asyncio.sleep(0.001)
        await wire.stage(three.parts[0])
        receiver.engine.broken_loads = 1  # the load of version two fails, and version one can be restored
        receiver.engine.may_load.set()
        with pytest.raises(grpc.aio.AioRpcError, match="version 1 is served again"):
            await committing
        assert same(receiver, one)
        await wire.push(three)
        assert same(receiver, three)


async def test_a_larger_version_gets_a_larger_buffer_and_the_small_one_goes() -> None:
    before = private_arenas()
    async with world() as (receiver, wire):
        for version in (1, 2):
            await wire.push(Sent(version))
        layout = plan_manifest([TensorSpec("a", "F32", (4000, 10)), TensorSpec("b", "F32", (5,)), TensorSpec("c", "F32", (9, 9))])
        data = np.random.default_rng(0).bytes(layout.nbytes)
        manifest = seal(layout.stamped("run", 1, 3), memoryview(data))
        await wire.stage((manifest, data), chunk=10_000)
        assert private_arenas() == before + 2
        await wire.commit(pb.VersionId(run_id="run", term=1, version=3))
        assert receiver.weights["a"].tobytes() == data[: 4 * 40_000]


async def test_parts_that_are_no_more_leave_nothing_behind() -> None:
    before = private_arenas()
    async with world() as (receiver, wire):
        await wire.push(Sent(1, parts=HALVES))
        assert private_arenas() == before + 2
        for version in (2, 3, 4):
            await wire.push(Sent(version))
        assert same(receiver, Sent(4))
        assert private_arenas() == before + 2


async def test_other_calls_are_answered_while_bytes_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing, may_hash = threading.Event(), threading.Event()
    real = Assembly.add

    def slow(assembly: Assembly, offset: int, data: memoryview) -> None:
        hashing.set()
        assert may_hash.wait(300)
        real(assembly, offset, data)

    monkeypatch.setattr(Assembly, "add", slow)
    async with world() as (receiver, wire):
        sent = Sent(1)
        streaming = asyncio.ensure_future(wire.push(sent))
        assert await asyncio.to_thread(hashing.wait, 300)
        probe = pb.ProbeRequest(run_id="run", term=1, arena_path="/dev/shm/none", nonce=bytes(16))
        assert not (await wire.stub.Probe(probe, timeout=300)).can_map
        assert not streaming.done()
        may_hash.set()
        await streaming
        assert same(receiver, sent)


def test_an_arena_without_a_name_is_mapped_by_other_processes_and_dies_with_its_owner() -> None:
    arena = Arena.private(5000)
    arena.begin(0)
    arena.slot_view(0)[:] = b"x" * 5000
    generation = arena.complete(0, 7, 3)
    code = (
        "import sys; from polyreme.weights.arena import Arena; a = Arena.open(sys.argv[1]); a.check(0, int(sys.argv[2]));"
        "print(a.nonce.hex(), a.version(0), bytes(a.slot_view(0)) == b'x' * 5000)"
    )
    command = [sys.executable, "-c", code, str(arena.path), str(generation)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == f"{arena.nonce.hex()} (3, 7) True"
    path = arena.path
    arena.close()
    with pytest.raises(ArenaError):
        Arena.open(path)
