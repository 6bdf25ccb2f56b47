"""Brings versions to replicas that cannot map the arena: every part as a delta where there is one, else whole.

Invariant:
- All parts that a replica receives are of one version. It takes the target version at its own start, and again when a stream of
  another part begins while nothing holds the version's slot.
- The slot, on every machine, is not written from the first whole stream until all parts arrive, unless training interrupts it.
- Each part comes from its machine or from a replica, on its own: see `part_streams`.
"""

from collections.abc import Awaitable, Callable

from polyreme.process.tasks import together
from polyreme_trainer.weight_sync.arena_slots import ArenaSlots
from polyreme_trainer.weight_sync.part_source import PartSource
from polyreme_trainer.weight_sync.part_streams import NewTargetError, PartStreams
from polyreme_trainer.weight_sync.push_limits import PushLimits
from polyreme_trainer.weight_sync.relay_plan import RelayPlan
from polyreme_trainer.weight_sync.replica_state import ReplicaState, Transfer, total
from polyreme_trainer.weight_sync.version import Version


class Streams:
    """The streams to all replicas. Runs on one event loop.

    Args:
        part_source: makes the source of a part, by its number.
        relay_roots: see `RelayPlan`.
        slots: of the arenas.
        target: the version that replicas should serve.
        address: of a live replica's gRPC server, by the replica's name; None when it has left.
        notice: reports to the run.
        changed: called when a slot may have become free.
        limits: of pushes.
    """

    def __init__(
        self,
        part_source: Callable[[int], PartSource],
        relay_roots: int,
        slots: ArenaSlots,
        target: Callable[[], Version | None],
        address: Callable[[str], str | None],
        notice: Callable[[str], Awaitable[None]],
        changed: Callable[[], None],
        limits: PushLimits,
    ) -> None:
        self._slots, self._target, self._changed = slots, target, changed
        self._make = lambda number: PartStreams(
            number, part_source(number), RelayPlan(relay_roots, limits.max_fetches), slots, target, address, notice
        )
        self._parts: list[PartStreams] = []

    def publish(self, version: Version, wanted: bool) -> None:
        """`version` is the newest. `wanted`: whether a replica receives streams."""
        for part in self._of(version):
            part.source.publish(version, wanted)

    async def bring(self, replica: ReplicaState, version: Version) -> tuple[Version, Transfer]:
        """Makes the replica stage the target version; `version` where there is none.

        Raises:
            SwapError, UnreachableError, StaleTermError: see `ReplicaClient`.
            InterruptedPushError: training needs the slot.
        """
        try:
            return await replica.interruptibly(self._bring(replica, version))
        finally:
            self._slots.drop(replica.lease.id)  # it has its own copy, also of the previous version
            self._changed()

    def drop(self, replica: str) -> None:
        """The replica has left, or is quarantined."""
        for part in self._parts:
            part.drop(replica)

    def close(self) -> None:
        """Ends the computation of deltas."""
        for part in self._parts:
            part.source.close()

    async def _bring(self, replica: ReplicaState, version: Version) -> tuple[Version, Transfer]:
        while True:
            version = self._target() or version
            try:
                transfers = await together(part.bring(replica, version) for part in self._of(version))
            except NewTargetError:
                continue
            return version, total(transfers, version.part_sizes)

    def _of(self, version: Version) -> list[PartStreams]:
        """The streams of the version's parts."""
        for number in range(len(self._parts), version.manifest.parts):
            self._parts.append(self._make(number))
        return self._parts[: version.manifest.parts]
