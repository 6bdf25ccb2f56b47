"""Records of the fraction of each role's weights that rank 0 has loaded.

Invariant: a load emits at most one record every REPORT_SECONDS, and none when it takes less time than that.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyreme.experience.run import Run
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme_trainer.learner.run_client import ATTACH_SECONDS

REPORT_SECONDS = 5.0

Loaded = Callable[[float], None]
"""Called with the loaded fraction of a role's weights, up to 1."""
LoadReports = Callable[[str], Loaded | None]
"""Returns the function to call with a role's loaded fraction, or None when nothing is reported. Called when the role begins to load."""


@dataclass
class LoadingPace:
    """When loading began and when it was last reported, in seconds on the same clock."""

    began: float
    reported: float

    def at(self, fraction: float, now: float) -> dict[str, Any] | None:
        """Returns the record to emit when `fraction` (above 0) of the weights is loaded; None when no record is due.

        A record is due REPORT_SECONDS after the previous one. If there was an earlier record, one is also due at the end, at fraction 1.
        """
        over = fraction >= 1 and self.reported > self.began
        if now - self.reported < REPORT_SECONDS and not over:
            return None
        self.reported = now
        left = (now - self.began) * (1 - fraction) / fraction
        return {"kind": "loading", "fraction": round(fraction, 3), "seconds_left": round(left, 1)}


def unreported(role: str) -> None:
    """`LoadReports` of ranks other than 0."""


def reports_to(emit: Callable[[dict[str, Any]], None]) -> LoadReports:
    """`LoadReports` whose records go to `emit`."""

    def begin(role: str) -> Loaded:
        now = time.monotonic()
        pace = LoadingPace(now, now)

        def loaded(fraction: float) -> None:
            if record := pace.at(fraction, time.monotonic()):
                emit({**record, "role": role})

        return loaded

    return begin


def reports_to_run(redis_url: str, run_id: str) -> LoadReports:
    """`LoadReports` whose records go to a run. The learner connects to the run only after its models exist, so each record opens its own
    connection."""
    return reports_to(lambda record: asyncio.run(_emit(redis_url, run_id, record)))


async def _emit(redis_url: str, run_id: str, record: dict[str, Any]) -> None:
    redis = await connect(redis_url, RECONNECT_TIMEOUT)
    try:
        run = await Run.attach(redis, run_id, ATTACH_SECONDS)
        await run.emit(record)
    finally:
        await redis.aclose()
