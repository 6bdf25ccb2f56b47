"""Decides at which version the replicas are held for its evaluation. Pure; time is an argument.

Invariant: at most one version is held, the first one due for evaluation that was published as the newest. It is released when its
evaluation has ended, and after `seconds` in any case.
"""

from collections.abc import Callable

from polyreme_trainer.weight_sync.version import Version


class EvalHold:
    """The held version, initially none.

    Args:
        is_due: whether a version is to be evaluated.
        seconds: maximum time for which a version is held.
    """

    def __init__(self, is_due: Callable[[int], bool], seconds: float) -> None:
        self._is_due, self._seconds = is_due, seconds
        self._done, self._until = -1, 0.0
        self.version: Version | None = None

    def published(self, newest: Version, now: float) -> None:
        """Holds `newest` when it is due and no other version is held."""
        if self.version is None and newest.number > self._done and self._is_due(newest.number):
            self.version, self._until = newest, now + self._seconds

    def update(self, evaluated: int, newest: Version, now: float) -> None:
        """Releases a version up to `evaluated`, and one that was held longer than `seconds`."""
        self._done = max(self._done, evaluated)
        if self.version is None:
            return
        if now >= self._until:
            self._done = max(self._done, self.version.number)
        if self.version.number <= self._done:
            self.version = None
            self.published(newest, now)
