"""The trainer's HTTP port: /health, /ready and /metrics, from the run's records.

Invariant: what is shown is one snapshot, which the event loop replaces whole; the serving thread only reads it. A run goes on whether
or not anybody looks.
"""

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from polyreme.cli.progress import SPLIT, Progress, Record, stream_time
from polyreme.cli.run_records import read_records
from polyreme.config.run import RunConfig, SecurityConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme.experience.run import Run, RunState
from polyreme.net import tls as secure
from polyreme.process.resource_metrics import Usage

logger = logging.getLogger(__name__)

_BLOCK_MS = 1000
_RETRY_SECONDS = 2.0
_NOT_SHOWN = ("kind", "iteration", "time")

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: what Prometheus is told."""

    state: RunState = RunState.STARTING
    gauges: dict[str, float] = field(default_factory=dict)
    replicas: dict[str, int] = field(default_factory=dict)


def snapshot(state: RunState, progress: Progress) -> Snapshot:
    """Every number of the newest iteration's and rollout's records under its own name (`time/train` is `time_train_seconds`), and what
    follows from them. The newest evaluation is `accuracy` or `score`, as its record names it."""
    gauges = {"alarms": float(progress.alarm_count)}
    if (score := progress.score()) is not None:
        gauges[progress.metric] = score
    if progress.last is not None:
        gauges |= _numbers(progress.rollout or {}) | _numbers(progress.last)
        gauges["iteration"] = float(progress.last["iteration"])
        seconds = progress.last["time/iteration"]
        gauges["learner_wait_ratio"] = progress.last[SPLIT["waiting for samples"]] / seconds if seconds else 0.0
    return Snapshot(state, gauges, dict(progress.versions))


class Exporter(Collector):
    """Follows a run's records and serves them."""

    def __init__(self, run: Run, config: RunConfig) -> None:
        self._run, self._folder, self._progress = run, config.run_dir, Progress(config.samples_per_iteration)
        self.shown = Snapshot()

    async def follow(self) -> None:
        """Keeps `shown` up to date; does not return."""
        cursor = await asyncio.to_thread(self._read_written)
        while True:
            try:
                for at, record in await self._run.records(cursor, _BLOCK_MS):
                    self._progress.add({"time": stream_time(at), **record})
                    cursor = at
                state, _ = await self._run.state()
                self.shown = snapshot(state, self._progress)
            except PolyremeError as error:
                logger.warning("the metrics stand still: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    def _read_written(self) -> str:
        """Adds the records that are on disk, and perhaps gone from the stream. Returns the stream id of the last one."""
        cursor = "0"
        for line in read_records(self._folder, self._run.run_id):
            self._progress.add(line)
            cursor = line["id"]
        return cursor

    def collect(self) -> Iterator[Metric]:
        """What /metrics shows, prefixed with polyreme_train_."""
        shown = self.shown
        for name, value in shown.gauges.items():
            yield GaugeMetricFamily(f"polyreme_train_{name}", "Of the newest iteration's record.", value)
        states = GaugeMetricFamily("polyreme_train_state", "1 for the run's state.", labels=["state"])
        for state in RunState:
            states.add_metric([state.value], float(state is shown.state))
        yield states
        versions = GaugeMetricFamily("polyreme_train_replica_version", "Version last committed.", labels=["replica"])
        for replica, version in shown.replicas.items():
            versions.add_metric([replica], version)
        yield versions


@asynccontextmanager
async def export(run: Run, config: RunConfig, host: str, port: int | None) -> AsyncIterator[int | None]:
    """Serves /health, /ready and /metrics until the block ends. Yields the port; None: nothing is served.

    Raises:
        ConfigError: the port is taken, or config.security cannot be used.
    """
    if port is None:
        yield None
        return
    exporter = Exporter(run, config)
    following = asyncio.create_task(exporter.follow())
    try:
        server = _listen(host, port, _application(exporter, config.security), config.security)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="exporter", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


def _application(exporter: Exporter, security: SecurityConfig | None) -> Application:
    registry = CollectorRegistry()
    registry.register(exporter)
    registry.register(Usage())
    metrics, token = make_wsgi_app(registry), secure.token(security) if security else None

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path in secure.PROBES:
            good = path == "/health" or exporter.shown.state in (RunState.RUNNING, RunState.DRAINING)
            return _answer(start, "200 OK" if good else "503 Service Unavailable", str(exporter.shown.state))
        if token is not None and not secure.authorized(environ.get("HTTP_AUTHORIZATION", "").encode("latin-1"), token):
            return _answer(start, "401 Unauthorized", "expected `authorization: Bearer TOKEN`")
        return list(metrics(environ, start)) if path == "/metrics" else _answer(start, "404 Not Found", "no such page")

    return application


def _answer(start: Callable[..., Any], status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [text.encode() + b"\n"]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request from %s failed", client_address, exc_info=True)  # a stranger's handshake, as a rule


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _listen(host: str, port: int, application: Application, security: SecurityConfig | None) -> _Server:
    context = secure.server_context(security) if security else None
    try:
        server = make_server(host, port, application, server_class=_Server, handler_class=_Handler)
    except OSError as error:
        raise ConfigError(
            f"a free port {port} on {host} for HTTP", error.strerror or str(error), "Choose another port, or end its owner."
        ) from None
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


def _numbers(record: Record) -> dict[str, float]:
    found = {}
    for key, value in record.items():
        if key not in _NOT_SHOWN and isinstance(value, int | float) and not isinstance(value, bool):
            unit = "_seconds" if key.startswith("time/") else ""
            found[re.sub(r"\W", "_", key) + unit] = float(value)
    return found
