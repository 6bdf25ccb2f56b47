"""A gateway's Prometheus metrics.

Invariant: each gateway has its own registry, so that several gateways can be in one process.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polyreme.process.resource_metrics import Usage


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Usage())
        self.requests = Counter(
            "polyreme_gateway_requests", "Requests to /v1, by status of the reply.", ["status"], registry=self.registry
        )
        self.seconds = Histogram(
            "polyreme_gateway_request_seconds",
            "Time from a request to the end of its reply.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        self.active = Gauge("polyreme_gateway_active_requests", "Requests that are read or answered.", registry=self.registry)
        self.retries = Counter("polyreme_gateway_retries", "Requests that were moved to another replica.", registry=self.registry)
        self.broken = Counter(
            "polyreme_gateway_broken_streams", "Streams that ended with an error after their start.", registry=self.registry
        )
        self.replicas = Gauge("polyreme_gateway_replicas", "Replicas that serve a version.", registry=self.registry)
