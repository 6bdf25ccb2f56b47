"""Reports of loading that reach a run from a process without a client of it.

Invariant: each record opens and closes its own connection.
"""

import asyncio

from polyreme.experience.loading import LoadReports, reports_to
from polyreme.experience.metric_records import MetricRecord
from polyreme.experience.run import Run
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme_trainer.learner.run_client import ATTACH_SECONDS


def reports_to_run(redis_url: str, run_id: str) -> LoadReports:
    """`LoadReports` whose records go to a run. The learner connects to the run only after its models exist."""
    return reports_to(lambda record: asyncio.run(_emit(redis_url, run_id, record)))


async def _emit(redis_url: str, run_id: str, record: MetricRecord) -> None:
    redis = await connect(redis_url, RECONNECT_TIMEOUT)
    try:
        run = await Run.attach(redis, run_id, ATTACH_SECONDS)
        await run.emit(record)
    finally:
        await redis.aclose()
