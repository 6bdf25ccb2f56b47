"""Exponential backoff with jitter, for every retry.

Invariant: the n-th delay is `first` * 2^(n-1), at most `longest`, times a factor in [0.5, 1.5). Pure, except that `draw` takes a
random factor.
"""

import random
from dataclasses import dataclass

_MAX_DOUBLINGS = 60


@dataclass(frozen=True)
class Backoff:
    """Delays in seconds."""

    first: float
    longest: float

    def delay(self, attempt: int, jitter: float = 0.5) -> float:
        """The delay after the n-th failure (n from 1). `jitter` in [0, 1); 0.5 gives the middle."""
        doublings = min(max(0, attempt - 1), _MAX_DOUBLINGS)
        return float(min(self.longest, self.first * 2.0**doublings) * (0.5 + jitter))

    def draw(self, attempt: int) -> float:
        """`delay` with random jitter."""
        return self.delay(attempt, random.random())
