"""The deltas between the versions of one learner, computed from the arena's slots during training.

Invariant:
- A delta reproduces the bytes of its version. It is dropped when one of its source slots was overwritten during the computation.
- No delta spans an anchor: a version that every replica without the arena receives whole.
- Training does not wait for a delta. A replica whose delta is missing receives the whole version.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from polyreme.weights.arena import Arena, ArenaError
from polyreme.weights.delta import WHOLE_ABOVE, DeltaError, WeightDelta, compact, diff
from polyreme.weights.manifest import Manifest, ManifestError
from polyreme_trainer.weight_sync.part_source import Offer
from polyreme_trainer.weight_sync.version import Version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedDelta:
    """A delta, and the seconds of its computation."""

    delta: WeightDelta
    seconds: float


class Deltas:
    """The deltas since the newest anchor, a `PartSource`. Runs on one event loop; threads compare, compress and combine.

    Args:
        arena: holds the versions.
        anchor_interval: versions between two anchors; 1: every version is one.
        threads: threads that compare tensors.
        on_slots: called with the slots that are being compared, when they change.

    Attributes:
        links: the deltas between one version and the next since the anchor, by the version that each starts from.
    """

    def __init__(self, arena: Arena, anchor_interval: int, threads: int, on_slots: Callable[[set[int]], None]) -> None:
        self._arena, self._interval, self._on_slots = arena, anchor_interval, on_slots
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="delta")
        self.links: dict[int, asyncio.Task[EncodedDelta | None]] = {}
        self._combined: dict[tuple[int, int], asyncio.Task[EncodedDelta | None]] = {}  # by base and target
        self._newest: Version | None = None
        self._targets: tuple[int, ...] = ()
        self._comparing: list[Version] = []
        self._turn = asyncio.Lock()

    def publish(self, version: Version, wanted: bool) -> None:
        """Starts computing the delta from the newest version to this one, which becomes the newest.

        Args:
            wanted: whether a replica receives streams.
        """
        before, self._newest = self._newest, version
        self._targets = (before.number, version.number) if before else (version.number,)
        self._combined = {pair: task for pair, task in self._combined.items() if pair[1] in self._targets}
        if not wanted or before is None or version.number % self._interval == 0:
            self.links.clear()
            return
        self.links[before.number] = asyncio.create_task(self._encode(before, version))
        self._forget_oldest(WHOLE_ABOVE * version.manifest.nbytes)

    async def between(self, base: int, target: int) -> EncodedDelta | None:
        """The delta from one version to another, the newest one or the one before, which another machine may still send.

        None when there is none, or it would be half of the version's bytes.
        """
        pair = base, target
        if pair not in self._combined:
            if base not in self.links or target not in self._targets:
                return None
            self._combined[pair] = asyncio.create_task(self._combine(base, target))
        combining = self._combined[pair]
        await asyncio.wait({combining})  # other waiters keep it when this one is cancelled
        return combining.result()

    async def offer(self, base: Version | None, version: Version) -> Offer:
        """See `PartSource`: from the arena, for the first machine's part."""
        encoded = await self.between(base.number, version.number) if base else None
        if encoded is None:
            return Offer(version.manifest, lambda client: client.stream(version))
        delta = encoded.delta
        return Offer(version.manifest, lambda client: client.stream_delta(delta), delta.manifest, encoded.seconds)

    def close(self) -> None:
        """Ends the threads after their current tensors."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for task in (*self.links.values(), *self._combined.values()):
            task.cancel()

    def _forget_oldest(self, most_bytes: float) -> None:
        """Keeps the newest links of at most `most_bytes` in total, since larger ones would be sent as a whole version anyway."""
        for base, link in reversed(list(self.links.items())):
            encoded = link.result() if link.done() and not link.exception() else None
            most_bytes -= len(encoded.delta.payload) if encoded else 0
            if most_bytes < 0:
                del self.links[base]

    async def _encode(self, before: Version, after: Version) -> EncodedDelta | None:
        self._comparing += [before, after]
        self._on_slots({version.slot for version in self._comparing})
        try:
            async with self._turn:  # one comparison uses all threads
                started = time.perf_counter()
                delta = await asyncio.to_thread(self._diff, before, after)
                return EncodedDelta(delta, time.perf_counter() - started) if delta else None
        except (ArenaError, DeltaError, ManifestError) as error:
            logger.info("no delta from version %d to %d: %s", before.number, after.number, error)
            return None
        finally:
            self._comparing.remove(before)
            self._comparing.remove(after)
            self._on_slots({version.slot for version in self._comparing})

    def _diff(self, before: Version, after: Version) -> WeightDelta | None:
        versions = (before, after)
        for version in versions:
            self._arena.check(version.slot, version.generation)
        manifests = [Manifest.from_proto(version.manifest) for version in versions]
        old, new = (self._arena.slot_view(version.slot) for version in versions)
        delta = diff(manifests[0], old, manifests[1], new, self._pool.map)
        for version in versions:
            self._arena.check(version.slot, version.generation)
        return delta

    async def _combine(self, base: int, target: int) -> EncodedDelta | None:
        """The links from `base` to `target` as one delta."""
        combined: EncodedDelta | None = None
        while base != target:
            link = self.links.get(base)
            part = await asyncio.shield(link) if link else None
            if part is None:
                return None
            base = int(part.delta.manifest.manifest.version)
            if combined is None:
                combined = part
                continue
            started = time.perf_counter()
            delta = await asyncio.to_thread(compact, combined.delta, part.delta)
            if delta is None:
                return None
            combined = EncodedDelta(delta, combined.seconds + part.seconds + time.perf_counter() - started)
        return combined
