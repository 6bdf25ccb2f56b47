"""The Prometheus metrics of a training service, from the observer's newest state.

Invariant: a scrape reads what is there, and asks nobody.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polyreme.experience.requests import tenant_in
from polyreme.process.resource_metrics import Usage
from polyreme.rundir.service_status import ServiceState
from polyreme_trainer.service.observer.observer import WORKERS, Observer

TOKENS = {"trained_tokens": "trained", "prompt_tokens": "prompt", "sampled_tokens": "sampled"}


class ServiceMetrics(Collector):
    """The metrics of a service. `registry` also has the use of its machine."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(Usage())

    def collect(self) -> Iterator[Metric]:
        """Names begin with polyreme_service_."""
        state = self._observer.state if self._observer else ServiceState("", 0.0, {})
        counts = self._observer.counts if self._observer else {}
        queue = GaugeMetricFamily("polyreme_service_queue", "Requests that wait or are executed.", labels=["worker", "tenant"])
        busy = GaugeMetricFamily(
            "polyreme_service_busy_fraction", "Fraction of the last minute in which a worker computed.", labels=["worker"]
        )
        seconds = CounterMetricFamily(
            "polyreme_service_busy_seconds", "Seconds for which a worker has computed.", labels=["worker"]
        )
        tokens = CounterMetricFamily(
            "polyreme_service_tokens",
            "Tokens of a tenant: in batches with a gradient (trained), in prompts, in answers (sampled).",
            labels=["tenant", "kind"],
        )
        steps = CounterMetricFamily("polyreme_service_steps", "Optimizer steps of a tenant's models.", labels=["tenant"])
        for worker, found in state.workers.items():
            for tenant, count in self._by_tenant(found.queued).items():
                queue.add_metric([worker, tenant], count)
            if found.busy is not None:
                busy.add_metric([worker], found.busy)
            seconds.add_metric([worker], counts.get(worker, {}).get("busy_seconds", 0.0))
        for name, amounts in counts.items():
            if name in WORKERS or self._observer is None:
                continue
            tenant = self._observer.name_of(name)
            for field, kind in TOKENS.items():
                tokens.add_metric([tenant, kind], amounts.get(field, 0.0))
            steps.add_metric([tenant], amounts.get("steps", 0.0))
        yield from (queue, busy, seconds, tokens, steps)

    def _by_tenant(self, queued: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for whose, count in queued.items():
            tenant = self._observer.name_of(tenant_in(whose)) if self._observer else ""
            found[tenant] = found.get(tenant, 0) + count
        return found
