"""The replica's own memory for versions that come by stream.

Kept here:
- What a version that is served, or on its way into the engine, lies in is not written.
- A part has one stream at a time: a newer one ends an older one, whose connection may be dead without anybody's knowing.
- What a broken stream brought stays, unstaged, until other bytes take its place; bytes that are there already are not sent again.
- At most one buffer of a part lies idle.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from polyreme.weights.arena import Arena
from polyreme.weights.assembly import Assembly
from polyreme.weights.manifest import Manifest
from polyreme.weights.wire import keep_memory
from polyreme_rollout.engine.base import ArenaSource

_SLOT = 0


class SupersededError(Exception):
    """A newer stream has taken this one's place."""


@dataclass
class _Buffer:
    """An arena of one slot, and how far its bytes have come."""

    arena: Arena
    assembly: Assembly
    generation: int = 0
    adding: "asyncio.Future[None] | None" = None

    def holds(self, manifest: Manifest) -> bool:
        return not self.assembly.broken and self.assembly.manifest.tensors == manifest.tensors

    async def idle(self) -> None:
        """Returns when no thread writes here any more. What one has raised was an older stream's."""
        if self.adding:
            await asyncio.wait({self.adding})
        self.adding = None


class Incoming:
    """A part on its way into a buffer: `add` what comes, in order, and `finish`."""

    def __init__(self, manifest: Manifest, buffer: _Buffer) -> None:
        self._manifest, self._buffer = manifest, buffer

    @property
    def position(self) -> int:
        """The offset of the byte to come next, before the first `add`."""
        return self._buffer.assembly.position

    async def add(self, offset: int, data: memoryview) -> None:
        """Takes the next bytes; returns when those before are hashed. Raises RangeError, DigestError, of those before too."""
        await self._added()
        self._buffer.adding = adding = asyncio.get_running_loop().run_in_executor(None, self._buffer.assembly.add, offset, data)
        adding.add_done_callback(lambda done: done.cancelled() or done.exception())  # a stream may end before it asks

    async def finish(self) -> ArenaSource | None:
        """Where the part lies; None: there are bytes yet to come. Raises RangeError, DigestError."""
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


class Intake:
    """The buffers of all parts. Everything runs on one event loop, but for copying and hashing.

    Args:
        in_use: the nonces of arenas that may not be written: of what is served, or being loaded.
        on_reuse: called with the nonce of an arena whose bytes are about to go: nothing may count on them any more.
    """

    def __init__(self, in_use: Callable[[], Collection[bytes]], on_reuse: Callable[[bytes], None]) -> None:
        self._in_use, self._on_reuse = in_use, on_reuse
        self._buffers: dict[int, list[_Buffer]] = {}
        self._streams: dict[int, _Stream] = {}

    @asynccontextmanager
    async def receive(self, manifest: Manifest) -> AsyncIterator[Incoming]:
        """The block receives a part, from where a broken stream of the same bytes has ended.

        Raises:
            SupersededError: from within the block: a newer stream of the part has begun.
            ManifestError: the manifest is not sealed.
            ConfigError: shared memory has no room.
        """
        keep_memory()
        part = manifest.part
        while older := self._streams.get(part):
            await older.end()
        stream = self._streams[part] = _Stream()
        try:
            yield Incoming(manifest, await self._buffer(manifest))
        except asyncio.CancelledError:
            if not stream.superseded or not stream.task:
                raise
            stream.task.uncancel()
            raise SupersededError(f"a newer stream of part {part} has begun") from None
        finally:
            del self._streams[part]
            stream.ended.set()

    async def _buffer(self, manifest: Manifest) -> _Buffer:
        """The buffer that holds the part's bytes, or their beginning, else one to begin in."""
        buffers = self._buffers.setdefault(manifest.part, [])
        for buffer in buffers:
            await buffer.idle()
            if buffer.holds(manifest):
                return buffer
        in_use = self._in_use()
        for part in [part for part in self._buffers if part >= manifest.parts]:  # there are fewer trainer hosts than before
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
