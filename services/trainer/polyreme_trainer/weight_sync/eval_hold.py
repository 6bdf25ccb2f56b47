"""Which version replicas are kept at so that it can be evaluated. Pure; time is an argument.

Kept here: one version at most, the first that is to be evaluated and was published as the newest; it is let go when nobody waits for
its evaluation any more, and after its time in any case.
"""

from collections.abc import Callable

from polyreme_trainer.weight_sync.replica_client import Version


class Hold:
    """At first nothing is held.

    Args:
        wanted: whether a version is to be evaluated.
        seconds: how long it is held at most.
    """

    def __init__(self, wanted: Callable[[int], bool], seconds: float) -> None:
        self._wanted, self._seconds = wanted, seconds
        self._done, self._until = -1, 0.0
        self.version: Version | None = None

    def published(self, newest: Version, now: float) -> None:
        """`newest` is complete: it is held unless another one still is."""
        if self.version is None and newest.number > self._done and self._wanted(newest.number):
            self.version, self._until = newest, now + self._seconds

    def look(self, evaluated: int, newest: Version, now: float) -> None:
        """Versions up to `evaluated` need not be held. What is held longer than it may be is given up."""
        self._done = max(self._done, evaluated)
        if self.version is None:
            return
        if now >= self._until:
            self._done = max(self._done, self.version.number)
        if self.version.number <= self._done:
            self.version = None
            self.published(newest, now)
