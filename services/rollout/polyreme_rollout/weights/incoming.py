"""A part or a delta that arrives by stream, and the memory that receives it.

Invariant: a buffer is complete when all its bytes match their digests, and only then has a location for the engine. One thread at
a time writes to it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from polyreme.weights import delta as deltas
from polyreme.weights.arena import Arena
from polyreme.weights.assembly import Assembly, RangeAssembly, RangeError
from polyreme.weights.delta import DeltaManifest
from polyreme.weights.digest import MapFunction
from polyreme.weights.manifest import ArenaSource, Manifest
from polyreme_rollout.weights.outgoing import Outgoing

SLOT = 0
THREADS = max(1, min(32, len(os.sched_getaffinity(0)) // 2))
"""Threads that apply and verify a delta. The other cores are the engine's."""


class Arrival:
    """The progress of a buffer, whose bytes arrive in order. A thread hashes them, and other replicas may fetch verified ones."""

    def __init__(self, assembly: RangeAssembly, data: memoryview) -> None:
        self.assembly = assembly
        self.outgoing = Outgoing(data[: assembly.nbytes], assembly.verified)
        self._adding: asyncio.Future[object] | None = None

    @property
    def position(self) -> int:
        """The offset of the next byte, while nothing is being added."""
        return self.assembly.position

    async def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes, once the previous bytes are hashed. Raises RangeError, DigestError, also for previous bytes."""
        await self.added()
        self._adding = asyncio.get_running_loop().run_in_executor(None, self.assembly.add, offset, data)
        self._adding.add_done_callback(self._publish)

    async def added(self) -> None:
        """Waits until all bytes are hashed. Raises as `add`."""
        if self._adding:
            await asyncio.shield(self._adding)

    async def idle(self) -> None:
        """Waits until no thread writes to the buffer. Ignores an error of that thread, which belongs to an older stream."""
        if self._adding:
            await asyncio.wait({self._adding})
        self._adding = None

    def begin(self) -> None:
        """Records that a stream has started."""
        self.outgoing.update(self.assembly.verified, arriving=True)

    def end(self) -> None:
        """Records that the stream has ended."""
        self.outgoing.update(self.outgoing.available, arriving=False)

    def _publish(self, added: "asyncio.Future[object]") -> None:
        if not added.cancelled() and not added.exception():  # the stream may end before it reads the error
            self.outgoing.update(self.assembly.verified, self.outgoing.arriving)


class Buffer:
    """An arena of one slot, and the progress of its bytes."""

    def __init__(self, arena: Arena, manifest: Manifest) -> None:
        self.arena, self.part, self.generation = arena, manifest.part, 0
        self._applying: asyncio.Future[Assembly] | None = None
        self.empty(manifest)

    @property
    def view(self) -> memoryview:
        return self.arena.slot_view(SLOT)

    def empty(self, manifest: Manifest) -> None:
        """Makes the buffer ready for the bytes of a part."""
        self.arena.begin(SLOT)
        self._hold(Assembly(manifest, self.view))

    def holds(self, manifest: Manifest) -> bool:
        return not self._assembly.broken and self._assembly.manifest.tensors == manifest.tensors

    def holds_all(self, manifest: Manifest) -> bool:
        return self._assembly.complete and self.holds(manifest)

    def source(self, manifest: Manifest) -> ArenaSource:
        """The location of the part, whose bytes are complete."""
        if self.arena.generation(SLOT) % 2:
            self.generation = self.arena.complete(SLOT, manifest.version, manifest.term)
        return ArenaSource(str(self.arena.path), self.arena.nonce, SLOT, self.generation, manifest)

    async def apply(self, manifest: Manifest, steps: Sequence["Payload"], base: "Buffer | None") -> None:
        """Writes the part that `manifest` describes into this buffer, and verifies it. Raises FrameError, DigestError.

        Args:
            steps: deltas, applied one after the other.
            base: holds the base of the first one; None: this buffer does.
        """
        self._assembly.broken = True  # until the result is verified
        self._applying = asyncio.get_running_loop().run_in_executor(None, self._apply, manifest, steps, base)
        self._applying.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._hold(await asyncio.shield(self._applying))

    def _apply(self, manifest: Manifest, steps: Sequence["Payload"], base: "Buffer | None") -> Assembly:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as pool:
            each: MapFunction = pool.map
            if base is not None:
                self.view[: manifest.nbytes] = base.view[: manifest.nbytes]
            for step in steps:
                deltas.apply(step.delta, step.data, self.view, each)
            return Assembly.verified_part(manifest, self.view, each)

    async def idle(self) -> None:
        """Waits until no thread writes to the buffer."""
        await self.arrival.idle()
        if self._applying:
            await asyncio.wait({self._applying})
        self._applying = None

    def _hold(self, assembly: Assembly) -> None:
        self._assembly, self.arrival = assembly, Arrival(assembly, self.view)


class Payload:
    """The arrived bytes of the newest delta's payload of a part. The thread that writes the bytes faults in the pages."""

    def __init__(self, delta: DeltaManifest) -> None:
        self.delta, self.data = delta, np.empty(delta.nbytes, np.uint8).data
        title = f"version {delta.manifest.version}"
        self.arrival = Arrival(RangeAssembly(delta.frames, delta.nbytes, self.data, title), self.data)

    def holds(self, delta: DeltaManifest) -> bool:
        return not self.arrival.assembly.broken and self.delta.tensors == delta.tensors

    def leads_to(self, manifest: Manifest) -> bool:
        """Whether all bytes have arrived, and the delta's result is this part."""
        return self.arrival.assembly.complete and self.delta.manifest.tensors == manifest.tensors


class _Arriving:
    """Bytes that arrive at a target: `add` them in order, then `finish`."""

    def __init__(self, nbytes: int, target: Buffer | Payload) -> None:
        self.nbytes, self._target = nbytes, target

    @property
    def position(self) -> int:
        """The offset of the next byte, before the first `add`."""
        return self._target.arrival.position

    async def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes, once the previous bytes are hashed. Raises RangeError, DigestError, also for previous bytes."""
        await self._target.arrival.add(offset, data)


class IncomingPart(_Arriving):
    """A part that arrives in a buffer."""

    apply_seconds = 0.0

    def __init__(self, manifest: Manifest, buffer: Buffer) -> None:
        super().__init__(manifest.nbytes, buffer)
        self._manifest, self._buffer = manifest, buffer

    async def finish(self) -> ArenaSource | None:
        """The location of the part; None while bytes are missing. Raises RangeError, DigestError."""
        await self._buffer.arrival.added()
        return self._buffer.source(self._manifest) if self._buffer.arrival.assembly.complete else None


class IncomingDelta(_Arriving):
    """A delta whose payload arrives.

    Args:
        payload: receives the bytes, or has them already, perhaps from an older delta with the same changes.
        apply: writes the delta's result into a buffer.
    """

    def __init__(self, delta: DeltaManifest, payload: Payload, apply: Callable[[], Awaitable[Buffer]]) -> None:
        super().__init__(delta.nbytes, payload)
        self._delta, self._apply = delta, apply
        self.apply_seconds = 0.0
        """Seconds that applying and verifying took, after `finish`."""

    async def finish(self) -> ArenaSource | None:
        """The location of the part; None while bytes are missing. Raises RangeError, FrameError, DigestError, ConfigError."""
        await self._target.arrival.added()
        if self.position < self.nbytes:
            return None
        started = time.perf_counter()
        buffer = await self._apply()
        self.apply_seconds = time.perf_counter() - started
        return buffer.source(self._delta.manifest)


class CompleteDelta:
    """A delta whose result is in a buffer already. It needs no bytes."""

    apply_seconds = 0.0

    def __init__(self, delta: DeltaManifest, buffer: Buffer) -> None:
        self._delta, self._buffer = delta, buffer
        self.nbytes = self.position = delta.nbytes

    async def add(self, offset: int, data: memoryview) -> None:
        """Raises RangeError."""
        raise RangeError(f"expected no bytes, because the delta is complete; found {len(data)} from {offset} on")

    async def finish(self) -> ArenaSource:
        """The location of the part."""
        return self._buffer.source(self._delta.manifest)


Incoming = IncomingPart | IncomingDelta | CompleteDelta
