"""Receives versions by stream into the replica's own memory, whole or as deltas.

Invariant:
- A buffer that holds the served version, or one that the engine is loading, is not written. A delta is applied to a copy of its base, or
  in place to a base that is not served.
- A part has one stream at a time. A newer stream ends an older one, whose connection may be dead without notice.
- The bytes of a broken stream stay, unstaged, until other bytes replace them; the next stream of the same part continues after them.
- At most one buffer per part is idle.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from polyreme.weights import delta as deltas
from polyreme.weights.arena import Arena
from polyreme.weights.assembly import Assembly, RangeError
from polyreme.weights.delta import DeltaManifest
from polyreme.weights.manifest import Manifest
from polyreme.weights.wire import keep_memory
from polyreme_rollout.engine.protocol import ArenaSource

_SLOT = 0


class SupersededError(Exception):
    """A newer stream of the same part has started."""


class BaseError(Exception):
    """The base of a delta is not here."""


@dataclass
class _Buffer:
    """An arena of one slot, and the progress of its bytes."""

    arena: Arena
    assembly: Assembly
    generation: int = 0
    adding: "asyncio.Future[Any] | None" = None

    def holds(self, manifest: Manifest) -> bool:
        return not self.assembly.broken and self.assembly.manifest.tensors == manifest.tensors

    def holds_all(self, manifest: Manifest) -> bool:
        return self.assembly.complete and self.holds(manifest)

    def source(self, manifest: Manifest) -> ArenaSource:
        """The location of the part, whose bytes are complete."""
        if self.arena.generation(_SLOT) % 2:
            self.generation = self.arena.complete(_SLOT, manifest.version, manifest.term)
        return ArenaSource(str(self.arena.path), self.arena.nonce, _SLOT, self.generation, manifest)

    def apply(self, delta: DeltaManifest, payload: memoryview, base: "_Buffer") -> Assembly:
        """Makes this buffer, which may be the base, hold what the delta leads to. For a thread. Raises FrameError, DigestError."""
        shadow = self.arena.slot_view(_SLOT)
        if base is not self:
            shadow[: delta.manifest.nbytes] = base.arena.slot_view(_SLOT)[: delta.manifest.nbytes]
        deltas.apply(delta, payload, shadow)
        return Assembly.verified(delta.manifest, shadow)

    async def idle(self) -> None:
        """Waits until no thread writes to the buffer. An error of that thread belongs to an older stream."""
        if self.adding:
            await asyncio.wait({self.adding})
        self.adding = None


class IncomingPart:
    """A part that arrives in a buffer: `add` its bytes in order, then `finish`."""

    apply_seconds = 0.0

    def __init__(self, manifest: Manifest, buffer: _Buffer) -> None:
        self._manifest, self._buffer = manifest, buffer

    @property
    def nbytes(self) -> int:
        return self._manifest.nbytes

    @property
    def position(self) -> int:
        """The offset of the next byte, before the first `add`."""
        return self._buffer.assembly.position

    async def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes, once the previous bytes are hashed. Raises RangeError, DigestError, also for previous bytes."""
        await self._added()
        self._buffer.adding = adding = asyncio.get_running_loop().run_in_executor(None, self._buffer.assembly.add, offset, data)
        adding.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # the stream may end before it reads the error

    async def finish(self) -> ArenaSource | None:
        """The location of the part; None while bytes are missing. Raises RangeError, DigestError."""
        await self._added()
        return self._buffer.source(self._manifest) if self._buffer.assembly.complete else None

    async def _added(self) -> None:
        if self._buffer.adding:
            await asyncio.shield(self._buffer.adding)


class IncomingDelta:
    """A delta that arrives: `add` the bytes of its payload in order, then `finish`.

    Args:
        delta: its manifest.
        apply: makes a buffer hold what the payload leads to.
        complete: a buffer that holds it already.
    """

    def __init__(self, delta: DeltaManifest, apply: Callable[[memoryview], Awaitable[_Buffer]], complete: _Buffer | None) -> None:
        self._delta, self._apply, self._complete = delta, apply, complete
        self._payload = bytearray()
        self.apply_seconds = 0.0
        """Seconds that applying and verifying took, after `finish`."""

    @property
    def nbytes(self) -> int:
        return self._delta.nbytes

    @property
    def position(self) -> int:
        """The offset of the next byte."""
        return self.nbytes if self._complete else len(self._payload)

    async def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes. Raises RangeError."""
        if offset != self.position or offset + len(data) > self.nbytes:
            raise RangeError(f"expected bytes from {self.position} on, up to {self.nbytes}; found {len(data)} from {offset} on")
        self._payload += data

    async def finish(self) -> ArenaSource | None:
        """The location of the part; None while bytes are missing. Raises FrameError, DigestError, ConfigError."""
        if self.position < self.nbytes:
            return None
        started = time.perf_counter()
        buffer = self._complete or await self._apply(memoryview(self._payload))
        self.apply_seconds = time.perf_counter() - started
        return buffer.source(self._delta.manifest)


@dataclass
class _Stream:
    task: "asyncio.Task[object] | None" = field(default_factory=asyncio.current_task)
    superseded: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def end(self) -> None:
        self.superseded = True
        if self.task:
            self.task.cancel()
        await self.ended.wait()


class WeightReceiver:
    """The buffers of all parts. Runs on one event loop, except for copying and hashing.

    Args:
        in_use: the nonces of arenas that must not be written, because they are served or being loaded.
        on_reuse: called with the nonce of an arena before its bytes are overwritten or released.
    """

    def __init__(self, in_use: Callable[[], Collection[bytes]], on_reuse: Callable[[bytes], None]) -> None:
        self._in_use, self._on_reuse = in_use, on_reuse
        self._buffers: dict[int, list[_Buffer]] = {}
        self._streams: dict[int, _Stream] = {}

    @asynccontextmanager
    async def receive(self, manifest: Manifest) -> AsyncIterator[IncomingPart]:
        """Receives a part during the block, starting where a broken stream of the same bytes ended.

        Raises:
            SupersededError: within the block, when a newer stream of the part starts.
            ManifestError: the manifest is not sealed.
            ConfigError: shared memory has no room.
        """
        async with self._sole_stream(manifest.part):
            held = next((buffer for buffer in await self._idle_buffers(manifest.part) if buffer.holds(manifest)), None)
            yield IncomingPart(manifest, held or await self._empty(manifest))

    @asynccontextmanager
    async def receive_delta(self, delta: DeltaManifest) -> AsyncIterator[IncomingDelta]:
        """Receives a delta during the block.

        Raises:
            BaseError: no buffer holds the base.
            SupersededError: within the block, when a newer stream of the part starts.
        """
        base_manifest, part = delta.base, delta.manifest.part
        async with self._sole_stream(part):
            buffers = await self._idle_buffers(part)
            complete = next((buffer for buffer in buffers if buffer.holds_all(delta.manifest)), None)
            bases = [buffer for buffer in buffers if buffer.holds_all(base_manifest)]
            if not bases and not complete:
                raise BaseError(f"expected version {delta.base_version} of term {delta.base_term} as the base; found other bytes")

            async def apply(payload: memoryview) -> _Buffer:
                in_use = self._in_use()
                base = min(bases, key=lambda buffer: buffer.arena.nonce in in_use)
                return await self._apply(delta, payload, base, base.arena.nonce in in_use)

            yield IncomingDelta(delta, apply, complete)

    async def _apply(self, delta: DeltaManifest, payload: memoryview, base: _Buffer, copies: bool) -> _Buffer:
        if copies:
            shadow = await self._empty(delta.manifest)
        else:
            shadow = base
            self._on_reuse(shadow.arena.nonce)
            shadow.arena.begin(_SLOT)
        shadow.assembly.broken = True  # until the result is verified
        applying = asyncio.get_running_loop().run_in_executor(None, shadow.apply, delta, payload, base)
        shadow.adding = applying
        applying.add_done_callback(lambda done: done.cancelled() or done.exception())
        shadow.assembly = await asyncio.shield(applying)
        return shadow

    @asynccontextmanager
    async def _sole_stream(self, part: int) -> AsyncIterator[None]:
        """Ends an older stream of the part, and turns the cancellation by a newer one into SupersededError."""
        keep_memory()
        while older := self._streams.get(part):
            await older.end()
        stream = self._streams[part] = _Stream()
        try:
            yield
        except asyncio.CancelledError:
            if not stream.superseded or not stream.task:
                raise
            stream.task.uncancel()
            raise SupersededError(f"a newer stream of part {part} has started") from None
        finally:
            del self._streams[part]
            stream.ended.set()

    async def _idle_buffers(self, part: int) -> list[_Buffer]:
        """The part's buffers, to which no thread writes."""
        buffers = self._buffers.setdefault(part, [])
        for buffer in buffers:
            await buffer.idle()
        return buffers

    async def _empty(self, manifest: Manifest) -> _Buffer:
        """A buffer for the part that is not in use, emptied."""
        buffers = self._buffers[manifest.part]
        in_use = self._in_use()
        for part in [part for part in self._buffers if part >= manifest.parts]:  # the trainer has fewer hosts than before
            self._buffers[part] = [buffer for buffer in self._buffers[part] if buffer.arena.nonce in in_use]
        idle = [buffer for buffer in buffers if buffer.arena.nonce not in in_use]
        chosen = next((buffer for buffer in idle if buffer.arena.slot_nbytes >= manifest.nbytes), None)
        for buffer in idle:
            self._on_reuse(buffer.arena.nonce)
            if buffer is not chosen:
                buffers.remove(buffer)
                buffer.arena.close()
        if chosen is None:
            arena = await asyncio.to_thread(Arena.private, max(1, manifest.nbytes))
            arena.begin(_SLOT)
            buffers.append(chosen := _Buffer(arena, Assembly(manifest, arena.slot_view(_SLOT))))
        else:
            chosen.arena.begin(_SLOT)
            chosen.assembly = Assembly(manifest, chosen.arena.slot_view(_SLOT))
        return chosen
