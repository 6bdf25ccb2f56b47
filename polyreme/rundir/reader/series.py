"""Series of a page: long ones as few points, and what a run had spent at each step, as positions on their x axes. Pure.

Invariant: a short enough series is returned unchanged. Otherwise every value lies between its bucket's lowest and highest, so no
peak disappears. Positions grow with the step, and have one value for each step whose duration and rate are recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyreme.rundir.reader.index_rows import WALL_TIME

Points = tuple[NDArray[np.int64], NDArray[np.float64]]
SECONDS, TOKENS, SAMPLES = "axis/seconds", "axis/tokens", "axis/samples"
AXES = (SECONDS, TOKENS, SAMPLES)
_RATES = {TOKENS: ("tokens_per_second", "train/tokens_per_second"), SAMPLES: ("samples_per_second",)}
_DURATIONS = ("time/iteration", "train/time/step")


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


def positions(axis: str, series: Callable[[str], Points]) -> Points:
    """Steps, int64 [n], and for each the seconds since the first step began, or the tokens or samples of all steps so far,
    float64 [n]. Empty where the run does not record what is needed.

    Args:
        axis: one of AXES.
        series: returns the steps and values of a metric; empty for a metric that the run lacks.
    """
    steps, durations = _first(_DURATIONS, series)
    if axis == SECONDS:
        ends, times = series(WALL_TIME)
        before = durations[:1] if steps[:1].tolist() == ends[:1].tolist() else np.zeros(1)
        return ends, np.maximum.accumulate(times - times[:1] + before[: len(times)])
    rated, rates = _first(_RATES[axis], series)
    both, of_duration, of_rate = np.intersect1d(steps, rated, assume_unique=True, return_indices=True)
    return both, np.cumsum(np.rint(durations[of_duration] * rates[of_rate]))


def _first(names: Sequence[str], series: Callable[[str], Points]) -> Points:
    """The first of the metrics that the run has; empty without any."""
    return next((found for name in names if len((found := series(name))[0])), (np.empty(0, np.int64), np.empty(0)))
