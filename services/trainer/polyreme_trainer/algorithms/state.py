"""What an algorithm carries from one iteration to the next. Plain numbers, so that a checkpoint holds them as JSON.

Invariant: a state is never changed in place; an update returns another one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all numbers seen so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def update(self, values: NDArray[np.float64]) -> "Moments":
        """With `values` [n] added: the parallel form of Chan, Golub and LeVeque 1983 (Am. Stat. 37), stable for any n."""
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
        """The unbiased standard deviation; 1 before there are two numbers that differ."""
        variance = self.squares / (self.count - 1) if self.count > 1 else 0.0
        return float(np.sqrt(variance)) if variance > 0 else 1.0


@dataclass(frozen=True)
class AlgorithmState:
    """The state of every primitive that has one.

    Attributes:
        kl_coef: of the KL penalty in the reward, where a controller adapts it; None before the first iteration.
        scores: moments of the scores, where they are normalised.
    """

    kl_coef: float | None = None
    scores: Moments = Moments()

    def to_json(self) -> dict[str, Any]:
        """Plain values, from which `from_json` makes an equal state."""
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "AlgorithmState":
        """Raises TypeError or KeyError on a tree that `to_json` did not write."""
        return cls(kl_coef=tree["kl_coef"], scores=Moments(**tree["scores"]))


INITIAL = AlgorithmState()
