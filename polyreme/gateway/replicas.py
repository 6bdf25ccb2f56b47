"""The replicas of a run from the view of a gateway: addresses, versions and loads.

Invariant: replicas join and leave with their leases. Version and load come from a replica's /metrics and are at most one poll
interval and one timeout old; a replica that does not answer gets no request. A Redis that does not answer changes nothing.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from polyreme import API_VERSION
from polyreme.errors import StoreError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.gateway.client import ReplicaHttp
from polyreme.gateway.limits import GatewayLimits
from polyreme.gateway.names import VersionBounds, Wanted

logger = logging.getLogger(__name__)

_ALL_VERSIONS = VersionBounds()
_VERSION, _READY, _LOAD = "polyreme_rollout_version", "polyreme_rollout_ready", "polyreme_rollout_active_slots"


@dataclass
class ServedReplica:
    """One replica.

    Attributes:
        id: id of its lease.
        address: host:port of its HTTP server.
        max_model_len: maximum length in tokens; 0: unknown.
        version: the served version; None: it is not ready, or it does not answer.
        load: number of sequences of the run, running or queued.
        outstanding: number of unfinished requests of this gateway.
        chosen: the count of all choices when it was last chosen.
        gone: its lease has been gone for `GatewayLimits.leave`. A lost machine does not end its connections.
    """

    id: str
    address: str
    max_model_len: int = 0
    version: int | None = None
    load: int = 0
    outstanding: int = 0
    chosen: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)


def choose(
    replicas: Iterable[ServedReplica], wanted: Wanted, tried: Set[str] = frozenset(), bounds: VersionBounds = _ALL_VERSIONS
) -> ServedReplica | None:
    """The least loaded replica with a wanted version; of equally loaded ones, the least recently chosen.

    Args:
        tried: ids of excluded replicas.
        bounds: bounds of the version, in addition to `wanted`.
    """
    left = [each for each in replicas if each.version is not None and each.id not in tried and bounds.allow(each.version)]
    if wanted == "latest":
        wanted = max((each.version for each in left if each.version is not None), default="any")
    fits = [each for each in left if wanted in ("any", each.version)]
    return min(fits, key=lambda each: (each.outstanding + each.load, each.chosen), default=None)


class ReplicaTable:
    """The replicas with a lease and an HTTP port.

    Args:
        http: client of the replicas.
    """

    def __init__(self, run: Run, http: ReplicaHttp, limits: GatewayLimits) -> None:
        self._registry, self._http, self._limits = Registry(run), http, limits
        self._replicas: dict[str, ServedReplica] = {}
        self._leaving: dict[str, tuple[float, ServedReplica]] = {}  # replicas without a lease, with the time of its loss
        self._choices = itertools.count(1)
        self._redis_lost = False

    @property
    def replicas(self) -> list[ServedReplica]:
        return list(self._replicas.values())

    @property
    def versions(self) -> list[int]:
        """The served versions, newest first."""
        return sorted({each.version for each in self._replicas.values() if each.version is not None}, reverse=True)

    async def keep_current(self) -> None:
        """Refreshes after each poll interval. Never returns."""
        while True:
            await asyncio.sleep(self._limits.poll_interval)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the leases and every replica's metrics once."""
        try:
            self._update(await self._registry.leases("rollout"))
            self._redis_lost = False
        except StoreError as error:
            if not self._redis_lost:
                logger.warning("the known replicas stay in use: %s", error)
            self._redis_lost = True
        await asyncio.gather(*(self._poll(each) for each in self.replicas))

    @contextmanager
    def chosen(self, wanted: Wanted, tried: Set[str], bounds: VersionBounds) -> Iterator[ServedReplica | None]:
        """See `choose`. The replica has one more outstanding request while the block runs."""
        replica = choose(self._replicas.values(), wanted, tried, bounds)
        if replica is None:
            yield None
            return
        replica.chosen, replica.outstanding = next(self._choices), replica.outstanding + 1
        try:
            yield replica
        finally:
            replica.outstanding -= 1

    def _update(self, leases: list[Lease]) -> None:
        live = {lease.id: lease for lease in leases if lease.http_address and lease.api == API_VERSION}
        now = time.monotonic()
        for id in self._replicas.keys() - live.keys():
            logger.info("replica %s left", id)
            self._leaving[id] = now, self._replicas.pop(id)
        for id in sorted(live.keys() - self._replicas.keys()):
            address = live[id].http_address
            logger.info("replica %s at %s joined", id, address)
            _, known = self._leaving.pop(id, (now, None))
            self._replicas[id] = known or ServedReplica(id, address, int(live[id].facts.get("max_model_len", 0)))
        for id in [id for id, (since, _) in self._leaving.items() if now - since >= self._limits.leave]:
            self._leaving.pop(id)[1].gone.set()

    async def _poll(self, replica: ServedReplica) -> None:
        numbers: dict[str, float] = {}
        with suppress(httpx.TransportError, TimeoutError, ValueError):
            async with asyncio.timeout(self._limits.poll):
                reply = await self._http.send("GET", replica.address, "/metrics")
                try:
                    numbers = _numbers((await reply.aread()).decode()) if reply.is_success else {}
                finally:
                    await reply.aclose()
        if not numbers and replica.version is not None:
            logger.warning("replica %s at %s does not answer", replica.id, replica.address)
        replica.version = int(numbers[_VERSION]) if numbers.get(_READY) and numbers.get(_VERSION, -1) >= 0 else None
        replica.load = int(numbers.get(_LOAD, 0))


def _numbers(text: str) -> dict[str, float]:
    """The gauges that a choice depends on. Raises ValueError when the text does not contain metrics."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if sample.name in (_VERSION, _READY, _LOAD)}
