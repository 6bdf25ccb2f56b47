"""Which arena slots may be written. Pure bookkeeping.

Kept here: a slot is free unless it holds the newest version (late joiners read it) or one that is kept, or a replica serves
from it (its way back when the next swap fails) or is being moved to it. What a replica tries next replaces what it tried before.
"""

from dataclasses import dataclass, field


@dataclass
class _Held:
    served: int | None = None
    tried: int | None = None
    stream: int = 0


@dataclass
class Slots:
    """The slots 0..count-1 of one arena; `count` is at least 2, and at least 3 where a version besides the newest may be kept."""

    count: int
    newest: int | None = None
    kept: int | None = None
    _held: dict[str, _Held] = field(default_factory=dict)
    _streams: int = 0

    def free(self) -> int | None:
        """The lowest slot that may be written now."""
        return next((slot for slot in self._others() if not self.holders(slot)), None)

    def holders(self, slot: int) -> list[str]:
        """The replicas that may be reading the slot."""
        return [replica for replica, held in self._held.items() if slot in (held.served, held.tried)]

    def trying(self, replica: str, slot: int) -> None:
        """The replica is about to be moved to the version in `slot`."""
        self._held.setdefault(replica, _Held()).tried = slot

    def streaming(self, replica: str, slot: int) -> None:
        """The version in `slot` is being sent to the replica, which needs no other slot."""
        self._streams += 1
        self._held[replica] = _Held(tried=slot, stream=self._streams)

    def served(self, replica: str, slot: int) -> None:
        """The replica serves the version in `slot` and needs no older one."""
        self._held[replica] = _Held(served=slot)

    def drop(self, replica: str) -> None:
        """The replica is gone, or left alone."""
        self._held.pop(replica, None)

    def laggards(self) -> list[str]:
        """The fewest replicas whose dropping frees a slot."""
        return min((self.holders(slot) for slot in self._others()), key=len)

    def interruptible(self) -> list[str]:
        """The streams whose end frees a slot. Of several such slots, the one whose streams have begun last: the others get through."""
        streams = {
            slot: [self._held[name].stream for name in self.holders(slot)] for slot in self._others() if self.holders(slot)
        }
        streams = {slot: begun for slot, begun in streams.items() if all(begun)}
        return self.holders(max(streams, key=lambda slot: min(streams[slot]))) if streams else []

    def _others(self) -> list[int]:
        return [slot for slot in range(self.count) if slot not in (self.newest, self.kept)]
