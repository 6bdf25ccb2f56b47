"""The state that an algorithm carries from one iteration to the next: plain numbers, which a checkpoint stores as JSON.

Invariant: a state is immutable; an update returns a new one.
"""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from polyreme.rundir.checkpoint_manifest import CheckpointFacts


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all numbers seen so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: NDArray[np.float64]) -> "Moments":
        """The moments with `values` [n]: the parallel form of Chan, Golub and LeVeque 1983 (Am. Stat. 37), stable for any n."""
        if len(values) == 0:
            return self
        count, mean = float(len(values)), float(values.mean())
        total, shift = self.count + count, mean - self.mean
        return Moments(
            count=total,
            mean=self.mean + shift * count / total,
            squares=self.squares + float(((values - mean) ** 2).sum()) + shift**2 * self.count * count / total,
        )

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 until two numbers differ."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return float(np.sqrt(variance)) if variance > 0 else 1.0


@dataclass(frozen=True)
class AlgorithmState:
    """The state of every primitive that has one.

    Attributes:
        kl_coef: the coefficient of the KL penalty in the reward when a controller adapts it; None before the first iteration.
        scores: the moments of the scores when they are normalised.
    """

    kl_coef: float | None = None
    scores: Moments = Moments()

    def to_json(self) -> dict[str, object]:
        """Plain values, which `from_json` restores to an equal state."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: CheckpointFacts) -> "AlgorithmState":
        """The state that `to_json` wrote. Raises TypeError or KeyError for any other tree."""
        return cls(kl_coef=tree["kl_coef"], scores=Moments(**tree["scores"]))


INITIAL = AlgorithmState()
