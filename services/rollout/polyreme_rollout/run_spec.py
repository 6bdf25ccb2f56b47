"""The parts of a run's record that a replica needs.

Invariant: a replica reads the run only from Redis. It needs no copy of the model or of the configuration file.
"""

import os
import socket
from dataclasses import dataclass

from polyreme.config.run import RunConfig
from polyreme.experience.listing import attached
from polyreme.experience.metric_records import EngineEnd, EngineStart, MetricRecord
from polyreme.experience.run import Run
from polyreme.experience.store import connected

FIND_RUN_TIMEOUT = 60.0


@dataclass(frozen=True)
class RunSpec:
    """A run, as far as a replica needs it.

    Attributes:
        model_files: config and tokenizer files by name.
        follows_newest: the replica serves whichever run is newest. It exits when a newer run starts, and its owner restarts it.
    """

    run_id: str
    config: RunConfig
    model_files: dict[str, bytes]
    model_fingerprint: str
    follows_newest: bool = False


async def fetch_run_spec(redis_url: str, run_id: str | None, find_timeout: float = FIND_RUN_TIMEOUT) -> RunSpec:
    """Waits for the run; None: the newest unfinished one. Raises StoreError, UnavailableError, ConfigError."""
    async with attached(redis_url, run_id, find_timeout, ended=False) as run:
        fingerprint = await run.model_fingerprint()
        return RunSpec(run.run_id, await run.config(), await run.model_files(), fingerprint, follows_newest=run_id is None)


async def report_engine(redis_url: str, run_id: str, engine: str, seconds: float | None = None) -> None:
    """Records that the replica's engine is starting or, with `seconds`, the duration of its start. Raises StoreError."""
    duration = None if seconds is None else round(seconds, 1)
    await _report(redis_url, run_id, EngineStart(host=socket.gethostname(), pid=os.getpid(), engine=engine, seconds=duration))


async def report_engine_end(redis_url: str, run_id: str, freed_bytes: int) -> None:
    """Records that the engine has ended for the learner, and the memory that only its processes had. Raises StoreError."""
    await _report(redis_url, run_id, EngineEnd(host=socket.gethostname(), pid=os.getpid(), freed_bytes=freed_bytes))


async def _report(redis_url: str, run_id: str, record: MetricRecord) -> None:
    async with connected(redis_url) as redis:
        await Run(redis, run_id).emit(record)
