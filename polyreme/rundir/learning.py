"""Whether a run has learned, from its records, and why it may not have.

Invariant: a pure function of the records, in bounded memory. It claims that nothing was learned only if neither the rewards of
training nor the evaluations have risen by more than their noise.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance

from polyreme.experience.metric_records import Evaluation, MetricValues

_ENOUGH = 10
"""Iterations before which nothing is claimed."""
_COMPARED = 20
"""Maximum number of first and of newest iterations whose mean rewards are compared."""
_MOSTLY = 0.9
_OFTEN = 0.5


@dataclass
class Learning:
    """What the iterations of a run say about its learning. `cut` and `equal` are sums of fractions."""

    iterations: int = 0
    first: list[float] = field(default_factory=list)
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=_COMPARED))
    lowest: float = math.inf
    highest: float = -math.inf
    rate: float = 0.0
    gradient: float = 0.0
    cut: float = 0.0
    equal: float = 0.0
    distils: bool = False

    def add(self, metrics: MetricValues) -> None:
        """Adds the metrics of an iteration. One without rewards, of an older release, says nothing."""
        if (mean := metrics.get("reward/mean")) is None:
            return
        reward = float(mean)
        self.iterations += 1
        if len(self.first) < _COMPARED:
            self.first.append(reward)
        self.newest.append(reward)
        self.lowest = min(self.lowest, metrics.get("critic/score/min", reward))
        self.highest = max(self.highest, metrics.get("critic/score/max", reward))
        self.rate = max(self.rate, metrics.get("actor/lr", 1.0))
        self.gradient = max(self.gradient, metrics.get("grad_norm", 1.0))
        self.cut += metrics.get("stop/length_fraction", 0.0)
        self.equal += metrics.get("zero_variance_group_fraction", 0.0)
        self.distils = self.distils or "actor/teacher_kl" in metrics

    def findings(self, evaluations: Mapping[int, float], newest: Evaluation | None) -> list[str]:
        """That nothing was learned, then what may be the cause, each as a sentence; empty if something was, or too early to say.

        Args:
            evaluations: result by version.
            newest: the newest evaluation, or None.
        """
        count = min(_COMPARED, self.iterations // 3)
        if self.iterations < _ENOUGH or self.distils:
            return []
        before, after = self.first[:count], list(self.newest)[-count:]
        noise = 2 * math.sqrt((pvariance(before) + pvariance(after)) / count)
        if fmean(after) - fmean(before) > noise or _improved(evaluations, newest):
            return []
        head = (
            f"nothing was learned: the mean reward was {fmean(before):.3f} in the first {count} iterations, {fmean(after):.3f}"
            " in the newest"
        )
        if len(evaluations) > 1:
            head += f"; evaluations {evaluations[min(evaluations)]:.3f} and {evaluations[max(evaluations)]:.3f}"
        return [head, *self._causes(newest)]

    def _causes(self, newest: Evaluation | None) -> list[str]:
        cut, equal = self.cut / self.iterations, self.equal / self.iterations
        labels = [example.get("label") for example in (newest.examples if newest else ())]
        found = []
        if self.rate == 0:
            found.append("the learning rate was 0 in every iteration")
        if self.lowest == self.highest:
            why = "the task may be solved already" if self.lowest > 0 else "the reward may not find the answers in the texts"
            found.append(f"every answer scored {self.lowest:g}, so none was better than another: {why}")
        elif equal > _MOSTLY:
            found.append(
                f"in {equal:.0%} of the groups all answers scored the same, and such a group teaches nothing: use easier"
                " prompts, a larger group_size, or a reward with more values than right and wrong"
            )
        if cut > _OFTEN:
            found.append(f"{cut:.0%} of the answers were cut at rollout.max_new_tokens, perhaps before the result")
        if labels and not any(labels):
            found.append("the labels of the held-out prompts are empty: check data.label_key")
        if self.gradient == 0 and self.lowest != self.highest:
            found.append("the gradient was 0 in every iteration")
        return found or [
            f"no cause is visible in the metrics: {self.iterations} iterations may be too few, or the learning rate"
            f" ({self.rate:g}) too small or too large"
        ]


def _improved(evaluations: Mapping[int, float], newest: Evaluation | None) -> bool:
    """Whether the newest result is above the first by more than the noise of so many prompts with results between 0 and 1."""
    if len(evaluations) < 2 or newest is None:
        return False
    before, after = evaluations[min(evaluations)], evaluations[max(evaluations)]
    spread = max(0.01, after * (1 - after)) if 0 <= after <= 1 else 0.0
    return after - before > 2 * math.sqrt(2 * spread / max(1, newest.samples))


def learning_lines(found: Sequence[str]) -> list[str]:
    """The findings as lines of a report."""
    return [f"{'warning' if not place else '  perhaps':8} {text}" for place, text in enumerate(found)]
