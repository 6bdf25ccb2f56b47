"""Times the parts of an iteration.

Invariant: the parts follow each other without a gap, so their seconds add up to the iteration's until its last lap.
"""

import time


class Clock:
    """Measures the seconds of an iteration's parts."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends the part `name`, which began when the previous part ended."""
        now = time.perf_counter()
        self._laps[name], self._last = now - self._last, now

    def total(self) -> dict[str, float]:
        """The seconds of every part, and of all of them as `iteration`."""
        return {**self._laps, "iteration": time.perf_counter() - self._began}
