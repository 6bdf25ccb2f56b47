"""The Prometheus metrics of the service, in their own registry.

Invariant: a metric counts this process alone.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polyreme.process.resource_metrics import Usage


class EnvironmentMetrics:
    """The Prometheus metrics of the service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Usage())
        self.playing = Gauge("polyreme_environment_episodes", "Episodes that are being played.", registry=self.registry)
        self.ended = Counter(
            "polyreme_environment_ended",
            "Episodes that ended: done, failed in the environment, lost with their process, or left by the caller.",
            ["how"],
            registry=self.registry,
        )
        self.refused = Counter("polyreme_environment_refused", "Episodes refused by a full server.", registry=self.registry)
        self.call_seconds = Histogram(
            "polyreme_environment_call_seconds",
            "Wall-clock seconds of one call of user code.",
            ["method"],
            registry=self.registry,
        )
        self.workers_replaced = Counter(
            "polyreme_environment_workers_replaced",
            "Worker processes that were replaced, by reason.",
            ["reason"],
            registry=self.registry,
        )
