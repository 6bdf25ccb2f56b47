"""Receives versions by stream into the replica's own memory.

Invariant:
- A buffer that holds the served version, or one that the engine is loading, is not written.
- A part has one stream at a time. A newer stream ends an older one, whose connection may be dead without notice.
- The bytes of a broken stream stay, unstaged, until other bytes replace them; the next stream of the same part continues after them.
- At most one buffer per part is idle.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from polyreme.weights.arena import Arena
from polyreme.weights.assembly import Assembly
from polyreme.weights.manifest import Manifest
from polyreme.weights.wire import keep_memory
from polyreme_rollout.engine.protocol import ArenaSource

_SLOT = 0


class SupersededError(Exception):
    """A newer stream of the same part has started."""


@dataclass
class _Buffer:
    """An arena of one slot, and the progress of its bytes."""

    arena: Arena
    assembly: Assembly
    generation: int = 0
    adding: "asyncio.Future[None] | None" = None

    def holds(self, manifest: Manifest) -> bool:
        return not self.assembly.broken and self.assembly.manifest.tensors == manifest.tensors

    async def idle(self) -> None:
        """Waits until no thread writes to the buffer. An error of that thread belongs to an older stream."""
        if self.adding:
            await asyncio.wait({self.adding})
        self.adding = None


class IncomingPart:
    """A part that arrives in a buffer: `add` its bytes in order, then `finish`."""

    def __init__(self, manifest: Manifest, buffer: _Buffer) -> None:
        self._manifest, self._buffer = manifest, buffer

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
        buffer, manifest = self._buffer, self._manifest
        if not buffer.assembly.complete:
            return None
        if buffer.arena.generation(_SLOT) % 2:
            buffer.generation = buffer.arena.complete(_SLOT, manifest.version, manifest.term)
        return ArenaSource(str(buffer.arena.path), buffer.arena.nonce, _SLOT, buffer.generation, manifest)

    async def _added(self) -> None:
        if self._buffer.adding:
            await asyncio.shield(self._buffer.adding)


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
        keep_memory()
        part = manifest.part
        while older := self._streams.get(part):
            await older.end()
        stream = self._streams[part] = _Stream()
        try:
            yield IncomingPart(manifest, await self._buffer(manifest))
        except asyncio.CancelledError:
            if not stream.superseded or not stream.task:
                raise
            stream.task.uncancel()
            raise SupersededError(f"a newer stream of part {part} has started") from None
        finally:
            del self._streams[part]
            stream.ended.set()

    async def _buffer(self, manifest: Manifest) -> _Buffer:
        """The buffer that holds the part's bytes or a prefix of them, else an empty one."""
        buffers = self._buffers.setdefault(manifest.part, [])
        for buffer in buffers:
            await buffer.idle()
            if buffer.holds(manifest):
                return buffer
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
