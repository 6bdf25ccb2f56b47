"""What a replica tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polyreme.process.resource_metrics import Usage


class Metrics:
    """The replica's own registry: vLLM's metrics live in the default one of the same process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Usage())
        self.tokens = Counter("polyreme_rollout_tokens", "Tokens sampled.", registry=self.registry)
        self.slots = Counter("polyreme_rollout_slots", "Slots ended, by finish reason.", ["finish"], registry=self.registry)
        self.active_slots = Gauge("polyreme_rollout_active_slots", "Slots under way.", registry=self.registry)
        self.version = Gauge("polyreme_rollout_version", "Policy version served; -1: none.", registry=self.registry)
        self.ready = Gauge("polyreme_rollout_ready", "1 while a version is served and calls are taken.", registry=self.registry)
        self.stall_seconds = Histogram(
            "polyreme_rollout_swap_stall_seconds",
            "How long generation stood still for a swap.",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=self.registry,
        )
        self.swap_failures = Counter("polyreme_rollout_swap_failures", "Swaps that failed.", registry=self.registry)
        self.version.set(-1)
