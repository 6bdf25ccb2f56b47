"""Tracks which arena slots may be written. Pure.

Invariant: a slot is free unless it holds the newest version (replicas that join read it) or the pinned one, or a replica serves
from it (to roll back when its next swap fails) or is loading it. A replica's next load replaces its previous one. A slot from
which a delta is being computed is free but used last, since training never waits for a delta.
"""

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class _Reader:
    serves: int | None = None
    loads: int | None = None
    stream: int = 0


@dataclass
class ArenaSlots:
    """The slots 0..count-1 of one arena; `count` is at least 2, and 3 where a version besides the newest may be pinned."""

    count: int
    newest: int | None = None
    pinned: int | None = None
    _compared: dict[int, frozenset[int]] = field(default_factory=dict)
    _readers: dict[str, _Reader] = field(default_factory=dict)
    _streams: int = 0

    def free(self) -> int | None:
        """The lowest slot that may be written now, if possible one that is not being compared."""
        return next((slot for slot in sorted(self._others(), key=self.compared.__contains__) if not self.readers(slot)), None)

    def compare(self, slots: Collection[int], part: int = 0) -> None:
        """Records the slots from which deltas of a part are being computed."""
        self._compared[part] = frozenset(slots)

    @property
    def compared(self) -> frozenset[int]:
        """The slots from which deltas are being computed on any machine."""
        return frozenset().union(*self._compared.values())

    def readers(self, slot: int) -> list[str]:
        """The replicas that may be reading the slot."""
        return [replica for replica, reader in self._readers.items() if slot in (reader.serves, reader.loads)]

    def loading(self, replica: str, slot: int) -> None:
        """Records that the replica is about to load the version in `slot`."""
        self._readers.setdefault(replica, _Reader()).loads = slot

    def streaming(self, replica: str, slot: int) -> None:
        """Records that the version in `slot` is being streamed to the replica, which needs no other slot."""
        self._streams += 1
        self._readers[replica] = _Reader(loads=slot, stream=self._streams)

    def serving(self, replica: str, slot: int) -> None:
        """Records that the replica serves the version in `slot` and needs no older one."""
        self._readers[replica] = _Reader(serves=slot)

    def drop(self, replica: str) -> None:
        """Records that the replica has left or is quarantined."""
        self._readers.pop(replica, None)

    def blocking_replicas(self) -> list[str]:
        """The smallest set of replicas whose removal frees a slot."""
        return min((self.readers(slot) for slot in self._others()), key=len)

    def interruptible(self) -> list[str]:
        """The streams whose end frees a slot. Of several such slots, the one whose streams started last, so the others finish."""
        streams = {
            slot: [self._readers[name].stream for name in self.readers(slot)] for slot in self._others() if self.readers(slot)
        }
        streams = {slot: started for slot, started in streams.items() if all(started)}
        return self.readers(max(streams, key=lambda slot: min(streams[slot]))) if streams else []

    def _others(self) -> list[int]:
        return [slot for slot in range(self.count) if slot not in (self.newest, self.pinned)]
