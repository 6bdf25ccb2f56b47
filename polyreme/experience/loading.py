"""Records of the fraction of a model's weights that a process has loaded.

Invariant: a load emits at most one record in an interval, and none when it takes less time than that.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from polyreme.experience.metric_records import Loading

REPORT_SECONDS = 5.0

Loaded = Callable[[float], None]
"""Called with the loaded fraction of a model's weights, up to 1."""
LoadReports = Callable[[str], Loaded | None]
"""Returns the function to call with the loaded fraction of a role's weights, or None when nothing is reported. Called when the
role begins to load."""


@dataclass
class LoadingPace:
    """When loading began and when it was last reported, in seconds on the same clock."""

    began: float
    reported: float
    interval: float = REPORT_SECONDS

    def at(self, role: str, fraction: float, now: float) -> Loading | None:
        """Returns the record to emit when `fraction` (above 0) of the weights is loaded; None when no record is due.

        A record is due `interval` seconds after the previous one. If there was one, another is due at the end, at fraction 1.
        """
        over = fraction >= 1 and self.reported > self.began
        if now - self.reported < self.interval and not over:
            return None
        self.reported = now
        left = (now - self.began) * (1 - fraction) / fraction
        return Loading(role=role, fraction=round(fraction, 3), seconds_left=round(left, 1))


def unreported(role: str) -> None:
    """`LoadReports` of a process that reports nothing."""


def reports_to(emit: Callable[[Loading], None], interval: float | None = None) -> LoadReports:
    """`LoadReports` whose records go to `emit`, see `LoadingPace`. `interval`: None: REPORT_SECONDS."""

    def begin(role: str) -> Loaded:
        now = time.monotonic()
        pace = LoadingPace(now, now, REPORT_SECONDS if interval is None else interval)

        def loaded(fraction: float) -> None:
            if record := pace.at(role, fraction, time.monotonic()):
                emit(record)

        return loaded

    return begin
