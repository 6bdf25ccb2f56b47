"""Chooses the replica for a group: the least loaded one with capacity and a new enough policy. Pure; time is an argument.

While others are about to serve that policy, capacity is a fair share of the samples. Otherwise the first replica with a new
version would take all the samples that wait for it.

Invariant: a target's `outstanding` is the tokens that its running calls may return, and `sequences` the number of their samples.
"""

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from polyreme.process.backoff import Backoff

FAILURE_BACKOFF = Backoff(first=0.5, longest=8.0)
"""Pauses after consecutive failed calls, in seconds."""
SUSPENSION = Backoff(first=15.0, longest=120.0)
"""Suspensions of a straggler, in seconds, without jitter."""


@dataclass
class Target:
    """The orchestrator's state of one replica.

    Attributes:
        version: the policy version of its newest commit; None: none yet.
        term: the learner's term of that commit.
        staged: a newer version that it commits soon in the same term, as far as known; its calls wait at the replica. None: none.
        outstanding, sequences: tokens that its running calls may still return, and the number of their samples.
        failures: consecutive failed calls; an arriving token resets the count.
        backoff_until: monotonic seconds before which it gets no call, after a failure.
        suspensions: number of suspensions as a straggler.
        suspended_until: monotonic seconds before which it gets no call, as a straggler.
    """

    id: str
    version: int | None = None
    term: int = 0
    staged: int | None = None
    outstanding: int = 0
    sequences: int = 0
    failures: int = 0
    backoff_until: float = 0.0
    suspensions: int = 0
    suspended_until: float = 0.0

    def reaches(self, version: int, term: int) -> bool:
        """Whether a call for `version` or newer, of a learner of `term` or newer, may be sent now."""
        newest = self.version if self.staged is None else self.staged
        return newest is not None and newest >= version and self.term >= term

    def available_at(self) -> float:
        """Monotonic seconds from which on it may get a call."""
        return max(self.backoff_until, self.suspended_until)


class Candidates:
    """The targets that may get calls for one version at one moment, the least loaded first.

    Args:
        min_version: the oldest acceptable policy version.
        term: the learner's term. A replica of an older term holds an abandoned policy.
        now: monotonic seconds.
        capacity: samples that a target decodes at once. A target with this number gets no further ones.
    """

    def __init__(self, targets: Iterable[Target], *, min_version: int, term: int, now: float, capacity: float) -> None:
        self._capacity = capacity
        self._usable = {
            target.id: target
            for target in targets
            if target.sequences < capacity and target.reaches(min_version, term) and target.available_at() <= now
        }
        self._queue = [(target.outstanding, target.id) for target in self._usable.values()]
        heapify(self._queue)

    def take(self, avoid: Set[str] = frozenset(), prefer: str | None = None) -> Target | None:
        """The usable target with the fewest outstanding tokens, ties by id; None when none is usable. It stays a candidate while
        it has room, with what its calls add to `outstanding` and `sequences` after this call.

        Args:
            avoid: ids to use only when no other target is usable.
            prefer: id to use if it is usable and not to be avoided, since its cache has the prefix.
        """
        known = None if prefer is None or prefer in avoid else self._usable.get(prefer)
        if known is not None and known.sequences < self._capacity:
            return known
        avoided: list[tuple[int, str]] = []
        found = None
        while self._queue and found is None:
            outstanding, name = self._queue[0]
            target = self._usable[name]
            if target.sequences >= self._capacity:
                heappop(self._queue)
            elif target.outstanding != outstanding:
                heapreplace(self._queue, (target.outstanding, name))
            elif name in avoid:
                avoided.append(heappop(self._queue))
            else:
                found = target
        for entry in avoided:
            heappush(self._queue, entry)
        return found or (self._usable[avoided[0][1]] if avoided else None)


def fair_share(targets: Iterable[Target], *, min_version: int, term: int, now: float, waiting: int) -> float:
    """The samples that one target may have while others are about to serve `min_version`; math.inf when no other is.

    About to serve it is a target with the version before, or before the first version. One that is further behind may never come.

    Args:
        waiting: samples that wait for `min_version`. `Candidates` documents the other arguments.
    """
    available = [target for target in targets if target.available_at() <= now]
    serving = [t for t in available if t.reaches(min_version, term)]
    coming = [t for t in available if (-1 if t.version is None else t.version) == min_version - 1 and t.staged is None]
    if not coming or not serving:
        return math.inf
    return math.ceil((waiting + sum(target.sequences for target in serving)) / (len(serving) + len(coming)))
