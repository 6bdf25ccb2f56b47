"""How far rank 0 has loaded the weights of each role, as records.

Invariant: of each load at most one record every REPORT_SECONDS, and none about weights that are loaded sooner.
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
"""Takes the fraction of a role's weights that is loaded, up to 1."""
LoadReports = Callable[[str], Loaded | None]
"""For a role that begins to load, what takes its fraction; None: it is not reported."""


@dataclass
class LoadingPace:
    """When loading began and when it was last reported, in seconds of one clock."""

    began: float
    reported: float

    def at(self, fraction: float, now: float) -> dict[str, Any] | None:
        """The record to emit where `fraction` of the weights, above 0, is loaded: when the last one is REPORT_SECONDS old, and after others
        also at the end, 1."""
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
    """`LoadReports` whose records go to a run. The learner's client of the run opens after its models exist, so each record has a connection
    of its own."""
    return reports_to(lambda record: asyncio.run(_emit(redis_url, run_id, record)))


async def _emit(redis_url: str, run_id: str, record: dict[str, Any]) -> None:
    redis = await connect(redis_url, RECONNECT_TIMEOUT)
    try:
        run = await Run.attach(redis, run_id, ATTACH_SECONDS)
        await run.emit(record)
    finally:
        await redis.aclose()
