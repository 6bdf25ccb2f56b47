"""The Prometheus metrics of the service, in their own registry.

Invariant: the cost of counting grows with the number of batches, not of items.
"""

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from polyreme.process.resource_metrics import Usage
from polyreme_reward.items import Outcome


class RewardMetrics:
    """The Prometheus metrics of the service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Usage())
        self._outcomes = Counter(
            "polyreme_reward_outcomes", "Outcomes of each reward, by status.", ["reward", "status"], registry=self.registry
        )
        self.refused = Counter("polyreme_reward_refused", "Items refused because the queue was full.", registry=self.registry)
        self.inside = Gauge(
            "polyreme_reward_items_inside", "Items that are accepted and not yet answered.", registry=self.registry
        )
        self.batch_seconds = Histogram(
            "polyreme_reward_batch_seconds", "Wall-clock seconds to score one batch.", registry=self.registry
        )
        self.workers_replaced = Counter(
            "polyreme_reward_workers_replaced",
            "Worker processes that were replaced, by reason.",
            ["reason"],
            registry=self.registry,
        )

    def count(self, reward: str, outcomes: Sequence[Outcome]) -> None:
        """Counts the outcomes of one reward for a batch."""
        for status, number in Tally(outcome.status for outcome in outcomes).items():
            self._outcomes.labels(reward, status.name.lower()).inc(number)
