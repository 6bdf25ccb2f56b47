"""Receives versions by stream into the replica's own memory, whole or as deltas.

Invariant:
- A buffer that holds the served version, or one that the engine is loading, is not written. A delta is applied in place to a base
  that is not served; otherwise to the version before, after the delta between the two, or else to a copy of its base.
- A part has one stream at a time. A newer stream ends an older one, whose connection may be dead without notice.
- The bytes of a broken stream stay unstaged until other bytes replace them; the next stream of that part continues after them.
- At most one buffer per part is idle. A part keeps the payload of at most one complete delta, until the whole part arrives.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from polyreme.weights.arena import Arena
from polyreme.weights.delta import DeltaManifest
from polyreme.weights.manifest import Manifest
from polyreme.weights.wire import keep_memory
from polyreme_rollout.weights.incoming import SLOT, Arrival, Buffer, CompleteDelta, IncomingDelta, IncomingPart, Payload
from polyreme_rollout.weights.outgoing import OutgoingParts, PartId
from polyreme_rollout.weights.staged_parts import VersionId


class SupersededError(Exception):
    """A newer stream of the same part has started."""


class BaseError(Exception):
    """No buffer holds the base of a delta."""


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

    Attributes:
        buffers: the memory of received versions, by part.
        payloads: the newest delta of each part, for other replicas.
    """

    def __init__(self, in_use: Callable[[], Collection[bytes]], on_reuse: Callable[[bytes], None]) -> None:
        self._in_use, self._on_reuse = in_use, on_reuse
        self.outgoing = OutgoingParts()
        self.buffers: dict[int, list[Buffer]] = {}
        self.payloads: dict[int, Payload] = {}
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
            self._drop_payloads(manifest)
            held = next((buffer for buffer in await self._idle_buffers(manifest.part) if buffer.holds(manifest)), None)
            buffer = held or await self._empty(manifest)
            async with self._offered(_part_id(manifest), buffer.arrival):
                yield IncomingPart(manifest, buffer)

    @asynccontextmanager
    async def receive_delta(self, delta: DeltaManifest) -> AsyncIterator[IncomingDelta | CompleteDelta]:
        """Receives a delta during the block.

        Raises:
            BaseError: no buffer holds the base.
            SupersededError: within the block, when a newer stream of the part starts.
        """
        base_manifest, part = delta.base, delta.manifest.part
        async with self._sole_stream(part):
            buffers = await self._idle_buffers(part)
            complete = next((buffer for buffer in buffers if buffer.holds_all(delta.manifest)), None)
            if complete:
                await self._offer_again(delta, complete)
                yield CompleteDelta(delta, complete)
                return
            bases = [buffer for buffer in buffers if buffer.holds_all(base_manifest)]
            if not bases:
                raise BaseError(f"expected version {delta.base_version} of term {delta.base_term} as the base; found other bytes")

            before = self.payloads.get(part)
            payload = await self._payload(delta)
            steps = [before] if before and before is not payload and before.leads_to(base_manifest) else []

            async def apply() -> Buffer:
                return await self._apply(delta.manifest, [*steps, payload], bases)

            async with self._offered(_delta_id(delta), payload.arrival):
                yield IncomingDelta(delta, payload, apply)

    async def _payload(self, delta: DeltaManifest) -> Payload:
        """The memory for the delta's payload, which replaces that of an older one."""
        payload = await self._held_payload(delta)
        if payload is None:
            self._drop_payloads(delta.manifest)
            payload = self.payloads[delta.manifest.part] = Payload(delta)
        return payload

    async def _held_payload(self, delta: DeltaManifest) -> Payload | None:
        """The memory that holds the delta's payload or the beginning of it."""
        if payload := self.payloads.get(delta.manifest.part):
            await payload.arrival.idle()
        return payload if payload and payload.holds(delta) else None

    def _drop_payloads(self, manifest: Manifest) -> None:
        """Releases the memory of the part's payload, and of parts that no longer exist."""
        for part in [part for part in self.payloads if part == manifest.part or part >= manifest.parts]:
            self.payloads.pop(part).arrival.outgoing.close()

    @asynccontextmanager
    async def _offered(self, id: PartId, arrival: Arrival) -> AsyncIterator[None]:
        """Offers the bytes that arrive during the block to other replicas, until the memory is reused."""
        self.outgoing.offer(id, arrival.outgoing)
        arrival.begin()
        try:
            yield
        finally:
            arrival.end()

    async def _offer_again(self, delta: DeltaManifest, complete: Buffer) -> None:
        """Offers bytes that are complete already to other replicas, perhaps as another version with the same bytes."""
        self.outgoing.offer(_part_id(delta.manifest), complete.arrival.outgoing)
        payload = await self._held_payload(delta)
        if payload and payload.arrival.assembly.complete:
            self.outgoing.offer(_delta_id(delta), payload.arrival.outgoing)

    async def _apply(self, manifest: Manifest, steps: list[Payload], bases: list[Buffer]) -> Buffer:
        """Applies the last step, a delta from `bases`, and before it the other one, if that saves a copy of a base."""
        in_use = self._in_use()
        idle = [buffer for buffer in self.buffers[manifest.part] if buffer.arena.nonce not in in_use]
        for first in range(len(steps) - 1, -1, -1):
            shadow = next((buffer for buffer in idle if buffer.holds_all(steps[first].delta.base)), None)
            if shadow is not None:
                self._reuse(shadow)
                shadow.arena.begin(SLOT)
                await shadow.apply(manifest, steps[first:], None)
                break
        else:
            shadow = await self._empty(manifest)
            await shadow.apply(manifest, steps[-1:], bases[0])
        self.outgoing.offer(_part_id(manifest), shadow.arrival.outgoing)
        return shadow

    def _reuse(self, buffer: Buffer) -> None:
        """Announces that the buffer's bytes will be overwritten or released."""
        self._on_reuse(buffer.arena.nonce)
        buffer.arrival.outgoing.close()

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

    async def _idle_buffers(self, part: int) -> list[Buffer]:
        """The part's buffers, to which no thread writes."""
        buffers = self.buffers.setdefault(part, [])
        for buffer in buffers:
            await buffer.idle()
        return buffers

    async def _empty(self, manifest: Manifest) -> Buffer:
        """A buffer for the part that is not in use, emptied."""
        buffers = self.buffers[manifest.part]
        in_use = self._in_use()
        gone = [part for part in self.buffers if part >= manifest.parts]  # the trainer has fewer hosts than before
        for buffer in [buffer for part in gone for buffer in self.buffers[part] if buffer.arena.nonce not in in_use]:
            self._reuse(buffer)
            self.buffers[buffer.part].remove(buffer)
        idle = [buffer for buffer in buffers if buffer.arena.nonce not in in_use]
        chosen = next((buffer for buffer in idle if buffer.arena.slot_nbytes >= manifest.nbytes), None)
        for buffer in idle:
            self._reuse(buffer)
            if buffer is not chosen:
                buffers.remove(buffer)
                buffer.arena.close()
        if chosen is None:
            arena = await asyncio.to_thread(Arena.private, max(1, manifest.nbytes))
            buffers.append(chosen := Buffer(arena, manifest))
        else:
            chosen.empty(manifest)
        return chosen


def _part_id(manifest: Manifest) -> PartId:
    return PartId(VersionId(manifest.term, manifest.version), manifest.part)


def _delta_id(delta: DeltaManifest) -> PartId:
    return replace(_part_id(delta.manifest), base=VersionId(delta.base_term, delta.base_version))
