"""The callers that wait for a claim on a replica.

Invariant: a claim for the oldest policy version is granted first, then in the order of arrival.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass

from polyreme_trainer.orchestrator.replicas.claim import Claim
from polyreme_trainer.orchestrator.replicas.router import Candidates, Target


@dataclass(eq=False)
class Waiter:
    """A caller that waits for a claim: for `sequences` samples of `tokens` in total, of `min_version` or newer."""

    tokens: int
    sequences: int
    min_version: int
    avoid: Set[str]
    prefer: str | None
    claim: asyncio.Future[Claim]


class ClaimQueue:
    """The waiting callers."""

    def __init__(self) -> None:
        self._by_version: dict[int, deque[Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def sequences(self, min_version: int) -> int:
        """The samples that wait for a version."""
        return sum(waiter.sequences for waiter in self._by_version.get(min_version, ()))

    def add(self, waiter: Waiter) -> None:
        self._by_version.setdefault(waiter.min_version, deque()).append(waiter)

    def remove(self, waiter: Waiter) -> None:
        """Removes a caller that has no claim."""
        queue = self._by_version[waiter.min_version]
        queue.remove(waiter)
        if not queue:
            del self._by_version[waiter.min_version]

    def grant(self, candidates_for: Callable[[int], Candidates], begin: Callable[[Target, Waiter], Claim]) -> None:
        """Gives the targets' capacity to the callers, in order, until one of them cannot get any.

        Args:
            candidates_for: the targets for a version, least loaded first.
            begin: makes a caller's claim on a target.
        """
        for version in sorted(self._by_version):
            queue, candidates = self._by_version[version], candidates_for(version)
            while queue:
                target = candidates.take(queue[0].avoid, queue[0].prefer)
                if target is None:
                    return  # then there is none for a newer version either
                waiter = queue.popleft()
                waiter.claim.set_result(begin(target, waiter))
            del self._by_version[version]
