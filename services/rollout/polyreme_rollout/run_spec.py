"""The parts of a run's record that a replica needs.

Invariant: a replica reads the run only from Redis. It needs no copy of the model or of the configuration file.
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

from polyreme.config.run import RunConfig
from polyreme.experience.run import Run
from polyreme.experience.store import connect

FIND_RUN_TIMEOUT = 60.0


@dataclass(frozen=True)
class RunSpec:
    """A run, as far as a replica needs it.

    Attributes:
        model_files: config and tokenizer files by name.
        follows_newest: the replica serves whichever run is the newest. It exits when a newer run starts, and its owner restarts it.
    """

    run_id: str
    config: RunConfig
    model_files: dict[str, bytes]
    model_fingerprint: str
    follows_newest: bool = False


async def fetch_run_spec(redis_url: str, run_id: str | None, find_timeout: float = FIND_RUN_TIMEOUT) -> RunSpec:
    """Waits for the run; None: the newest unfinished one. Raises StoreError, UnavailableError, ConfigError."""
    redis = await connect(redis_url)
    try:
        run = await Run.attach(redis, run_id, find_timeout, ended=False)
        fingerprint = await run.model_fingerprint()
        return RunSpec(run.run_id, await run.config(), await run.model_files(), fingerprint, follows_newest=run_id is None)
    finally:
        await redis.aclose()


async def report_engine(redis_url: str, run_id: str, engine: str, seconds: float | None = None) -> None:
    """Records that the replica's engine is starting or, with `seconds`, the duration of its start. Raises StoreError."""
    duration = {} if seconds is None else {"seconds": round(seconds, 1)}
    await _report(redis_url, run_id, {"kind": "engine_start", "engine": engine, **duration})


async def report_engine_end(redis_url: str, run_id: str, freed_bytes: int) -> None:
    """Records that the engine has ended for the learner, and the memory that only its processes had. Raises StoreError."""
    await _report(redis_url, run_id, {"kind": "engine_end", "freed_bytes": freed_bytes})


async def _report(redis_url: str, run_id: str, record: dict[str, Any]) -> None:
    redis = await connect(redis_url)
    try:
        await Run(redis, run_id).emit({**record, "host": socket.gethostname(), "pid": os.getpid()})
    finally:
        await redis.aclose()
