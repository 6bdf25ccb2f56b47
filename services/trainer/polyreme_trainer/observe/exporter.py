"""The trainer's HTTP port: /health, /ready and /metrics, from the run's records, and the run page at /ui, from the run directory.

Invariant: a scrape reads one snapshot, which `keep_current` replaces as a whole. Scrapes cannot delay or fail a run.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme.experience.run import Run, RunState
from polyreme.net.http_server import PROBES, serve_http
from polyreme.page import PATH
from polyreme.page.api import application, is_open
from polyreme.page.runs import Runs
from polyreme.page.server_status import ServerStatus
from polyreme.page.threads import PageThreads
from polyreme.process.resource_metrics import Usage
from polyreme.process.tasks import running
from polyreme.rundir.progress import SPLIT, Progress, stream_time
from polyreme.rundir.run_records import add_written

logger = logging.getLogger(__name__)

_INTERVAL = 1.0
"""Seconds between two snapshots."""
_PAGE_NICENESS = 10
_NOT_SHOWN = ("kind", "iteration", "time")


@dataclass(frozen=True)
class MetricsSnapshot:
    """The exported values of a run at one moment."""

    state: RunState = RunState.STARTING
    gauges: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)
    tracker_failures: dict[str, int] = field(default_factory=dict)


def snapshot(state: RunState, progress: Progress) -> MetricsSnapshot:
    """The run's gauges: every number of the newest `iteration` and `rollout` records under its own name (`time/train` becomes
    `time_train_seconds`), the ratios derived from them, and the newest evaluation under its name, `accuracy` or `score`."""
    gauges = {"alarms": float(progress.alarm_count)}
    if (score := progress.score()) is not None:
        gauges[progress.metric] = score
    if progress.last is not None:
        gauges |= _numbers(progress.rollout.metrics if progress.rollout else {}) | _numbers(progress.last.metrics)
        gauges["iteration"] = float(progress.last.iteration)
        seconds = progress.last.metrics["time/iteration"]
        gauges["learner_wait_ratio"] = progress.last.metrics[SPLIT["waiting for samples"]] / seconds if seconds else 0.0
    return MetricsSnapshot(state, gauges, dict(progress.versions), dict(progress.tracker_failures))


class Exporter(Collector):
    """Follows a run's records and exports them."""

    def __init__(self, run: Run, config: RunConfig) -> None:
        self._run, self._folder, self._progress = run, config.run_dir, Progress(config.samples_per_iteration)
        self.shown = MetricsSnapshot()

    async def keep_current(self) -> None:
        """Keeps `shown` up to date. Never returns."""
        cursor = await asyncio.to_thread(add_written, self._progress, self._folder, self._run.run_id)
        while True:
            try:
                for at, record in await self._run.records(cursor, block_ms=0):
                    self._progress.add({"time": stream_time(at), **record})
                    cursor = at
                state, _ = await self._run.state()
                self.shown = snapshot(state, self._progress)
            except PolyremeError as error:
                logger.warning("the metrics are stale: %s", error)
            await asyncio.sleep(_INTERVAL)

    def collect(self) -> Iterator[Metric]:
        """The run's metrics; their names begin with polyreme_train_."""
        shown = self.shown
        for name, value in shown.gauges.items():
            yield GaugeMetricFamily(f"polyreme_train_{name}", "From the newest iteration's records.", value)
        states = GaugeMetricFamily("polyreme_train_state", "1 for the run's state.", labels=["state"])
        for state in RunState:
            states.add_metric([state.value], float(state is shown.state))
        yield states
        versions = GaugeMetricFamily("polyreme_train_replica_version", "Version last committed.", labels=["replica"])
        for replica, version in shown.replicas.items():
            versions.add_metric([replica], version)
        yield versions
        failures = GaugeMetricFamily(
            "polyreme_train_tracker_failures", "Number of the tracker's failures since the newest start.", labels=["tracker"]
        )
        for tracker, count in shown.tracker_failures.items():
            failures.add_metric([tracker], count)
        yield failures


@asynccontextmanager
async def export(run: Run, config: RunConfig, host: str, port: int | None) -> AsyncIterator[int | None]:
    """Serves /health, /ready, /metrics and the run page within the block. Yields the bound port; without `port`, serves nothing.

    Raises:
        ConfigError: the port is taken, or config.security cannot be used.
    """
    if port is None:
        yield None
        return
    exporter, runs = Exporter(run, config), Runs([config.run_dir], PageThreads(_PAGE_NICENESS))
    page = _application(exporter, application(runs, ServerStatus(run)))
    async with (
        running(exporter.keep_current(), runs.keep_current()),
        serve_http(host, port, page, security=config.security, is_open=is_open) as bound,
    ):
        yield bound


def _application(exporter: Exporter, page: ASGIApp) -> ASGIApp:
    registry = CollectorRegistry()
    registry.register(exporter)
    registry.register(Usage())
    metrics = make_asgi_app(registry)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/metrics":
            await metrics(scope, receive, send)
        elif path == PATH or path.startswith(f"{PATH}/"):
            await page(scope, receive, send)
        elif path in PROBES:
            good = path == "/health" or exporter.shown.state in (RunState.RUNNING, RunState.DRAINING)
            await PlainTextResponse(f"{exporter.shown.state}\n", 200 if good else 503)(scope, receive, send)
        else:
            problem = f"expected {PATH}, /metrics, {' or '.join(PROBES)}; found {path}\n"
            await PlainTextResponse(problem, 404)(scope, receive, send)

    return application


def _numbers(record: Mapping[str, object]) -> dict[str, float]:
    found = {}
    for key, value in record.items():
        if key not in _NOT_SHOWN and isinstance(value, int | float) and not isinstance(value, bool):
            unit = "_seconds" if key.startswith(("time/", "timing/")) else ""
            found[re.sub(r"\W", "_", key) + unit] = float(value)
    return found
