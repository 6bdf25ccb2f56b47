"""The status of a live run's servers: its leases in Redis, and the current values of each server's /metrics.

Invariant: a status is at most MAX_AGE seconds old, for any number of pages. A server that does not answer in time is shown
without numbers. This module never delays or fails a run.
"""

import asyncio
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from polyreme.config.security import EndpointSecurity, SecurityConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme.experience.leases import Kind, Lease, Registry
from polyreme.experience.run import Run
from polyreme.experience.store import connected
from polyreme.net import tls
from polyreme.net.direct_http import open_direct
from polyreme.rundir.reader import RunReader
from polyreme.rundir.run_directory import read_config, read_run_file, redis_of

KINDS: tuple[Kind, ...] = ("rollout", "reward", "learner")
MAX_AGE = 3.0
_TIMEOUT = 2.0
_SHOWN = {
    "polyreme_rollout_version": "version",
    "polyreme_rollout_active_slots": "load",
    "polyreme_rollout_swap_failures_total": "faults",
    "polyreme_rollout_tokens_total": "tokens",
    "polyreme_reward_items_inside": "load",
    "polyreme_reward_workers_replaced_total": "faults",
    "polyreme_cpu_seconds_total": "cpu_seconds",
    "polyreme_memory_bytes": "memory_bytes",
    "polyreme_device_memory_bytes": "device_memory_bytes",
}


class ServerStatus:
    """Reads the status of the servers of runs, and caches each result for MAX_AGE seconds.

    Args:
        store: the Redis of the runs: a run that is connected to it, or its URL. None: the Redis in each run's run.json.
    """

    def __init__(self, store: Run | str | None = None) -> None:
        self._store = store
        self._answers: dict[Path, tuple[float, list[dict[str, object]]]] = {}
        self._lock = asyncio.Lock()

    async def of(self, reader: RunReader) -> list[dict[str, object]]:
        """The registered servers: kind, id and addresses, and version, load and faults of those that answer. Empty when Redis
        does not answer."""
        async with self._lock:
            asked, found = self._answers.get(reader.run_dir, (float("-inf"), []))
            if time.monotonic() - asked > MAX_AGE:
                found = []
                with suppress(PolyremeError, OSError, TimeoutError):
                    found = await self._ask(reader)
                self._answers[reader.run_dir] = time.monotonic(), found
            return found

    async def _ask(self, reader: RunReader) -> list[dict[str, object]]:
        if reader.summary().get("state") not in ("starting", "running", "draining"):
            return []
        async with asyncio.timeout(2 * _TIMEOUT), self._run(reader) as run:
            registry = Registry(run)
            leases = [lease for kind in KINDS for lease in await registry.leases(kind)]
        security = read_config(reader.run_dir).security
        async with asyncio.timeout(2 * _TIMEOUT):
            return list(await asyncio.gather(*(asyncio.to_thread(describe, lease, security) for lease in leases)))

    @asynccontextmanager
    async def _run(self, reader: RunReader) -> AsyncIterator[Run]:
        """The reader's run, connected to its Redis."""
        if isinstance(self._store, Run):
            yield self._store
            return
        run_file = read_run_file(reader.run_dir)
        url = self._store or (redis_of(reader.run_dir, run_file) if run_file and run_file.redis_url else "")
        if not url:
            raise ConfigError(f"a Redis of run {reader.run_id}", "none", "Pass --redis.")
        async with connected(url, _TIMEOUT) as redis:
            yield Run(redis, reader.run_id)


def describe(lease: Lease, security: SecurityConfig | None) -> dict[str, object]:
    """The status of a server from its lease and its /metrics."""
    numbers: dict[str, float] = {}
    if lease.http_address:
        with suppress(OSError, ValueError, PolyremeError):
            numbers = read_metrics(lease.http_address, security)
    return {
        "kind": lease.kind,
        "name": lease.id,
        "address": lease.address,
        "http": lease.http_address,
        "answers": bool(numbers),
        "asked": time.time(),
        **numbers,
    }


def read_metrics(address: str, security: SecurityConfig | None) -> dict[str, float]:
    """The sums of the metrics in _SHOWN at a server's /metrics. Raises as `scrape`."""
    found: dict[str, float] = {}
    for sample in scrape(address, security):
        if name := _SHOWN.get(sample.name):
            found[name] = found.get(name, 0.0) + sample.value
    return found


def scrape(address: str, security: SecurityConfig | None) -> list[Sample]:
    """The samples at a server's /metrics. Raises OSError or ValueError when it does not answer with metrics."""
    scheme, context, headers = "http", None, {}
    if security is not None:
        if security.certificate is not None:
            scheme, context = "https", _context(security)
        if (token := tls.token(security)) is not None:
            headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{scheme}://{address}/metrics", headers=headers)
    try:
        with open_direct(request, _TIMEOUT, context) as answer:
            text = answer.read().decode()
    except HTTPException as error:  # another protocol, or a server that ends now
        raise ConnectionError(f"no whole answer from {address}: {error!r}") from None
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _context(security: SecurityConfig) -> ssl.SSLContext:
    shown = security.mutual
    return tls.client_context(
        EndpointSecurity(ca=security.ca, certificate=security.certificate if shown else None, key=security.key if shown else None)
    )
