"""Finds runs in a Redis: all of them for commands that only read, or the one that a service belongs to.

Invariant: nothing here changes a run, and no call loads a run's log.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from polyreme.errors import UnavailableError
from polyreme.experience.leases import Registry
from polyreme.experience.metric_records import Line
from polyreme.experience.run import ENDED, Run
from polyreme.experience.scripts import key
from polyreme.experience.store import connected
from polyreme.process.lifecycle import stop_event

_META = ("state", "reason", "iterations", "version")
_SCAN_COUNT = 1000


@dataclass(frozen=True)
class ListedRun:
    """A run as its Redis describes it.

    Attributes:
        run_id, state, reason: as in `Run.recorded_state`.
        iteration: the newest trained iteration; 0 before the first.
        iterations: the configured number.
        replicas: ids of the registered rollout servers, sorted; empty for a run that has ended.
        records: the newest metric records that Redis still has, oldest first, each with its stream id under `id`.
    """

    run_id: str
    state: str
    reason: str
    iteration: int
    iterations: int
    replicas: tuple[str, ...] = ()
    records: list[Line] = field(default_factory=list)


async def run_ids(redis: Redis) -> list[str]:
    """The ids of all runs in this Redis, sorted."""
    prefix, suffix = key("\n", "meta").split("\n")
    store: Any = redis
    found = [name.decode() async for name in store.scan_iter(match=f"{prefix}*{suffix}", count=_SCAN_COUNT)]
    return sorted(name.removeprefix(prefix).removesuffix(suffix) for name in found)


async def list_run(redis: Redis, run_id: str, records: int = 500) -> ListedRun:
    """Describes a run with at most `records` of its newest records. Raises UnavailableError when this Redis does not have it."""
    run = Run(redis, run_id)
    state, reason = await run.recorded_state()
    _, _, iterations, version = await run.redis.hmget(run.key("meta"), *_META)
    entries = await run.redis.xrevrange(run.key("metrics"), count=records)
    newest = [{"id": at.decode(), **json.loads(fields[b"json"])} for at, fields in reversed(entries)]
    live = () if state in ENDED else tuple(lease.id for lease in await Registry(run).leases("rollout"))
    return ListedRun(run_id, state, reason, max(0, int(version or 0)), int(iterations or 0), live, newest)


async def list_runs(redis: Redis) -> list[ListedRun]:
    """Describes every run in this Redis, sorted by id."""
    found = []
    for run_id in await run_ids(redis):
        with suppress(UnavailableError):  # it has been removed since
            found.append(await list_run(redis, run_id))
    return found


@asynccontextmanager
async def attached(
    redis_url: str, run_id: str | None, wait: float, reconnect_timeout: float | None = None, ended: bool = True
) -> AsyncIterator[Run]:
    """A run, with a connection of its own until the block ends. Arguments and errors are those of `connect` and `Run.attach`."""
    async with connected(redis_url, reconnect_timeout) as redis:
        yield await Run.attach(redis, run_id, wait, ended)


@asynccontextmanager
async def service_run(
    redis_url: str, run_id: str | None, wait: float, reconnect_timeout: float | None = None
) -> AsyncIterator[tuple[Run, asyncio.Event]]:
    """Attaches to a run that has not ended, while the block runs.

    Args:
        run_id: None: the newest run.
        wait: seconds to wait for it.
        reconnect_timeout: see `connect`.

    Yields:
        The run, and the event that ends the service: a signal, or the newest run's end. No graceful shutdown is needed before.

    Raises:
        StoreError, UnavailableError: see `connect` and `Run.attach`.
    """
    async with attached(redis_url, run_id, wait, reconnect_timeout, ended=False) as run:
        stop = stop_event()
        async with run.set_when_over(stop) if run_id is None else nullcontext():
            yield run, stop
