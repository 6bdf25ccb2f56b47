"""Which replica gets a group: the least loaded one that has room and whose policy is new enough. Pure; time is an argument.

Invariant: `outstanding` of a target is the number of tokens that were promised to it and have neither arrived nor been given up, and
`slots` the number of samples that they are of.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass
class Target:
    """What the orchestrator knows of one replica.

    Attributes:
        version: the policy version that its newest commit put in place; None: none yet.
        term: the learner's term of that commit.
        outstanding, slots: promised to it by running calls: tokens, and the samples that they are of.
        resting_until: monotonic seconds before which it is not asked, after a failure.
        failures: failures in a row; any arriving token ends the row.
        quarantined_until: monotonic seconds before which it is not asked, since it did not keep pace.
        quarantines: how often so far.
    """

    id: str
    version: int | None = None
    term: int = 0
    outstanding: int = 0
    slots: int = 0
    resting_until: float = 0.0
    failures: int = 0
    quarantined_until: float = 0.0
    quarantines: int = 0

    def free_at(self) -> float:
        """Monotonic seconds from which on it may be asked."""
        return max(self.resting_until, self.quarantined_until)


def choose(
    targets: Iterable[Target], *, min_version: int, term: int, now: float, room: float, avoid: Set[str] = frozenset()
) -> Target | None:
    """The usable target with the fewest outstanding tokens, ties by id; None when none is usable.

    Args:
        min_version: the oldest policy version that will do.
        term: the learner's term: an older one's replicas hold a policy that was given up.
        now: monotonic seconds.
        room: samples that a target decodes at once: with as many under way, it gets no more.
        avoid: ids taken only when no other is usable.
    """
    usable = [
        target
        for target in targets
        if target.slots < room
        and target.version is not None
        and target.version >= min_version
        and target.term >= term
        and target.free_at() <= now
    ]
    return min(usable, key=lambda target: (target.id in avoid, target.outstanding, target.id), default=None)


def rest_after(failures: int, jitter: float) -> float:
    """Seconds to leave a target alone after its n-th failure in a row: 0.5 s doubling to 8 s, times (0.5 + jitter), jitter in [0, 1)."""
    return min(8.0, 0.5 * 2.0 ** max(0, failures - 1)) * (0.5 + jitter)


def quarantine_for(times: int) -> float:
    """Seconds of a target's n-th quarantine: 15 s doubling to two minutes."""
    return min(120.0, 15.0 * 2.0 ** max(0, times - 1))
