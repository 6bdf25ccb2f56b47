"""A replica's Prometheus metrics.

Invariant: they have their own registry, because vLLM uses the default registry of the same process.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polyreme.process.resource_metrics import Usage


class ReplicaMetrics:
    """The metrics of one replica."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Usage())
        self.tokens = Counter("polyreme_rollout_tokens", "Sampled tokens.", registry=self.registry)
        self.sequences = Counter(
            "polyreme_rollout_slots", "Finished sequences, by finish reason.", ["finish"], registry=self.registry
        )
        self.active_sequences = Gauge(
            "polyreme_rollout_active_slots", "Sequences of unfinished calls, running or queued.", registry=self.registry
        )
        self.version = Gauge("polyreme_rollout_version", "Served policy version; -1: none.", registry=self.registry)
        self.ready = Gauge(
            "polyreme_rollout_ready", "1 while a version is served and calls are accepted.", registry=self.registry
        )
        self.stall_seconds = Histogram(
            "polyreme_rollout_swap_stall_seconds",
            "Time that a weight swap paused generation.",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=self.registry,
        )
        self.swap_failures = Counter("polyreme_rollout_swap_failures", "Failed weight swaps.", registry=self.registry)
        self.received_bytes = Counter(
            "polyreme_rollout_received_weight_bytes", "Weights received by stream.", ["source"], registry=self.registry
        )
        self.relayed_bytes = Counter(
            "polyreme_rollout_relayed_weight_bytes", "Weights sent to other replicas.", registry=self.registry
        )
        self.device_seconds = Histogram(
            "polyreme_rollout_device_seconds",
            "Colocated: time to leave the devices (sleep) and to take their memory back (wake).",
            ["step"],
            buckets=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
            registry=self.registry,
        )
        self.device_freed = Gauge(
            "polyreme_rollout_device_freed_bytes",
            "Colocated: device memory that the replica freed when it left the devices last.",
            registry=self.registry,
        )
        self.recomputed = Counter(
            "polyreme_rollout_recomputed_sequences",
            "Colocated: running sequences that lost their key-value cache with the devices.",
            registry=self.registry,
        )
        self.version.set(-1)
