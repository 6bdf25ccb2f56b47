"""How far rank 0 has loaded a model's weights, as records of the run.

Invariant: at most one record every REPORT_SECONDS, and none about weights that are loaded sooner. The learner's client of the run opens after
its models exist, so each record has a connection of its own.
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


def reporter(redis_url: str, run_id: str) -> Callable[[float], None]:
    """A function that takes the loaded fraction of the weights and records it in the run."""
    now = time.monotonic()
    pace = LoadingPace(now, now)

    def loaded(fraction: float) -> None:
        if record := pace.at(fraction, time.monotonic()):
            asyncio.run(_emit(redis_url, run_id, record))

    return loaded


async def _emit(redis_url: str, run_id: str, record: dict[str, Any]) -> None:
    redis = await connect(redis_url, RECONNECT_TIMEOUT)
    try:
        run = await Run.attach(redis, run_id, ATTACH_SECONDS)
        await run.emit(record)
    finally:
        await redis.aclose()
