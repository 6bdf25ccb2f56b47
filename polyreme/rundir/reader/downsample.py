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
    starts, counts = _buckets(len(steps), points)
    return Series(
        steps=steps[starts + counts - 1],
        mean=np.add.reduceat(values, starts) / counts,
        low=np.minimum.reduceat(values, starts),
        high=np.maximum.reduceat(values, starts),
    )


def last_of_each(steps: NDArray[np.int64], values: NDArray[np.float64], points: int) -> Series:
    """As `downsample`, with the last value of each bucket, for a series that grows."""
    if len(steps) > points:
        starts, counts = _buckets(len(steps), points)
        steps, values = steps[starts + counts - 1], values[starts + counts - 1]
    return Series(steps, values, values, values)


def _buckets(count: int, points: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first value of each bucket, and each bucket's number of values."""
    starts = np.linspace(0, count, points, endpoint=False).astype(np.int64)
    return starts, np.diff(np.append(starts, count))
