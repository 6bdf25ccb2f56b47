"""Dynamic sampling: drops scored groups whose samples have no gradient; the log admits others in their place.

Yu et al. 2025 (arXiv 2503.14476), section 3.2. Invariant: during one iteration at most REFILL times its number of groups is
dropped, so an iteration ends even if every prompt's scores are equal. Groups beyond that limit are kept and make the batch smaller: the
algorithm leaves them out of the loss and of its divisor.
"""

import numpy as np

from polyreme.experience.records import GroupRecord
from polyreme_trainer.algorithms.filters import informative

REFILL = 3
"""Number of groups that may be dropped for each group of an iteration."""


class DynamicSampling:
    """Decides which groups are dropped, and counts them and their scores.

    Args:
        enabled: whether groups are dropped at all.
        groups: the number of groups of an iteration.
    """

    def __init__(self, enabled: bool, groups: int) -> None:
        self._limit = REFILL * groups if enabled else 0
        self._enabled = enabled
        self._dropped: list[float] = []
        self._kept: list[float] = []

    def drops(self, record: GroupRecord) -> bool:
        """Whether to drop a scored group, so that another may take its place. Counts the group."""
        scores = np.array([sample.score for sample in record.scored])
        useless = len(self._dropped) < self._limit and not informative(scores, np.zeros(len(scores), dtype=np.int64)).any()
        (self._dropped if useless else self._kept).append(record.mean_reward)
        return useless

    def take(self) -> dict[str, float]:
        """Metrics since the last call: dropped groups, and the mean score of all groups, dropped ones included. Resets the counts."""
        scored = [*self._dropped, *self._kept]
        metrics = {"rollout/dropped_groups": float(len(self._dropped))}
        if scored:
            metrics["rollout/mean_score"] = float(np.mean(scored))
        self._dropped, self._kept = [], []
        return metrics if self._enabled else {}
