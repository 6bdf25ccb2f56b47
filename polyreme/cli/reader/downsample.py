"""Reduces long series to few points. Pure.

Invariant: a series that is short enough is returned unchanged. Otherwise every value lies between the lowest and highest value of its
bucket, so no peak disappears.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Series:
    """A metric over its steps, n points.

    Attributes:
        steps: int64 [n], the last step of each bucket, ascending.
        mean, low, high: float64 [n], mean, smallest and largest value of each bucket.
    """

    steps: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def downsample(steps: NDArray[np.int64], values: NDArray[np.float64], points: int) -> Series:
    """At most `points` points of a series [n], in buckets of nearly equal numbers of values."""
    if len(steps) <= points:
        return Series(steps, values, values, values)
    starts = np.linspace(0, len(steps), points, endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(steps)))
    return Series(
        steps=steps[starts + counts - 1],
        mean=np.add.reduceat(values, starts) / counts,
        low=np.minimum.reduceat(values, starts),
        high=np.maximum.reduceat(values, starts),
    )
