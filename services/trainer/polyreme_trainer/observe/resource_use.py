"""Processor, memory and device use of a run's processes, for its iterations' records, and of a stage's, for those of its steps.

Invariant: a run is measured every INTERVAL seconds beside the records, so that it delays nothing. A server that does not answer
in time is left out. A stage is measured between two steps, which takes milliseconds, and at most every INTERVAL seconds.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean

import psutil  # type: ignore[import-untyped]
from prometheus_client.samples import Sample

from polyreme.config.security import SecurityConfig
from polyreme.errors import PolyremeError
from polyreme.experience.leases import Kind, Lease, Registry
from polyreme.experience.metric_records import MetricRecord, StageStep
from polyreme.experience.run import Run
from polyreme.page.server_status import scrape
from polyreme.process.resource_metrics import Usage

INTERVAL = 10.0
_SERVERS: tuple[Kind, ...] = ("rollout", "reward", "environment")

Service = tuple[str, str]
"""The role and the id of a process with its children."""


@dataclass
class ResourceUse:
    """What the services of a run used since the last `take`: the mean number of cores and the largest memory by role, and the
    mean share of time in which the devices of their machines were busy, and the largest memory there."""

    _spent: dict[Service, tuple[float, float]] = field(default_factory=dict)
    _means: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _largest: dict[str, float] = field(default_factory=dict)

    def add(self, measured: Mapping[Service, tuple[float, Sequence[Sample]]]) -> None:
        """Adds a measurement: per service, a time in seconds and its metrics' samples. A device that several see counts once."""
        cores, memory = defaultdict[str, float](float), defaultdict[str, float](float)
        busy, device_memory = dict[str, float](), dict[str, float]()
        spent: dict[Service, tuple[float, float]] = {}
        for service, (at, samples) in measured.items():
            for sample in samples:
                match sample.name:
                    case "polyreme_cpu_seconds_total":
                        spent[service] = at, sample.value
                        since, before = self._spent.get(service, (at, 0.0))
                        if at > since and sample.value >= before:  # less: one of its processes has ended
                            cores[f"resources/{service[0]}/cores"] += (sample.value - before) / (at - since)
                    case "polyreme_memory_bytes":
                        memory[f"resources/{service[0]}/memory_bytes"] += sample.value
                    case "polyreme_device_busy_ratio":
                        busy[sample.labels["uuid"]] = sample.value
                    case "polyreme_device_memory_bytes":
                        device_memory[sample.labels["uuid"]] = sample.value
        self._spent = spent
        if busy:
            cores["resources/device_busy_fraction"] = fmean(busy.values())
            memory["resources/device_memory_bytes"] = sum(device_memory.values())
        for name, value in cores.items():
            self._means[name].append(value)
        for name, value in memory.items():
            self._largest[name] = max(value, self._largest.get(name, 0.0))

    def take(self) -> dict[str, float]:
        """The metrics of the measurements since the last call; {} without any."""
        found = {name: fmean(values) for name, values in self._means.items()} | self._largest
        self._means.clear()
        self._largest = {}
        return found

    def added(self, records: Iterable[tuple[str, dict[str, object]]]) -> list[tuple[str, dict[str, object]]]:
        """Records with their stream ids, of which the first iteration has the metrics since the last call that had one."""
        return [(at, {**each, **self.take()} if each["kind"] == "iteration" else each) for at, each in records]


class StageUse:
    """What a stage's trainer used between two of its steps.

    Args:
        pid: the process whose children the ranks are.
        clock: seconds, monotonic.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._usage, self._use, self._clock = Usage(pid), ResourceUse(), clock
        self._due = clock()

    def added(self, record: MetricRecord) -> MetricRecord:
        """The record. A step's has the metrics since the last one that had some, if a measurement is due."""
        if not isinstance(record, StageStep) or self._clock() < self._due:
            return record
        self._due = self._clock() + INTERVAL
        with suppress(psutil.Error):  # the process has ended, and this one is about to
            self._use.add({("trainer", ""): _own(self._usage)})
        return replace(record, metrics={**record.metrics, **self._use.take()})


async def keep_measuring(use: ResourceUse, run: Run, security: SecurityConfig | None) -> None:
    """Measures this process with its children, and the run's servers. Never returns."""
    registry, usage = Registry(run), await asyncio.to_thread(Usage)
    while True:
        leases: list[Lease] = []
        with suppress(PolyremeError):  # without Redis, this machine alone
            leases = [lease for kind in _SERVERS for lease in await registry.leases(kind) if lease.http_address]
        own = asyncio.to_thread(_own, usage)
        found = await asyncio.gather(own, *(asyncio.to_thread(_of_server, lease, security) for lease in leases))
        services: list[Service] = [("trainer", ""), *((lease.kind, lease.id) for lease in leases)]
        use.add({service: (at, samples) for service, (at, samples) in zip(services, found, strict=True) if samples})
        await asyncio.sleep(INTERVAL)


def _own(usage: Usage) -> tuple[float, list[Sample]]:
    return time.monotonic(), [sample for metric in usage.collect() for sample in metric.samples]


def _of_server(lease: Lease, security: SecurityConfig | None) -> tuple[float, list[Sample]]:
    samples: list[Sample] = []
    with suppress(OSError, ValueError, PolyremeError):
        samples = scrape(lease.http_address, security)
    return time.monotonic(), samples
