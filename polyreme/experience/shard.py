"""The orchestrators of a run share its groups by index.

Invariant: a group has one orchestrator, which follows from its index and their number alone, so nothing about it is stored.
"""

from dataclasses import dataclass


def role_of(number: int) -> str:
    """The name of an orchestrator's process, and of its term in the log."""
    return f"orchestrator-{number}" if number else "orchestrator"


@dataclass(frozen=True)
class Shard:
    """One of a run's orchestrators. It makes the groups whose index is `number` modulo `count`. The first one leads: it alone
    admits groups, evaluates, and reports."""

    number: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        return self.number == 0

    @property
    def name(self) -> str:
        """See `role_of`."""
        return role_of(self.number)

    def owns(self, index: int) -> bool:
        """Whether it makes this group."""
        return index % self.count == self.number

    def among(self, start: int, stop: int) -> range:
        """The indices of its groups from `start` up to `stop`, which is not included."""
        return range(start + (self.number - start) % self.count, stop, self.count)

    def share(self, capacity: int) -> int:
        """Its part of the capacity of all orchestrators, at least 1. The parts sum to `capacity` if that is at least `count`."""
        return max(1, (capacity + self.count - 1 - self.number) // self.count)


ONLY = Shard()
"""The orchestrator of a run that has one."""
