"""What a run had spent at each step, as positions on the x axes of curves: seconds, tokens, samples. Pure.

Invariant: positions grow with the step, and have one value for each step whose duration and rate are recorded.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from polyreme.rundir.reader.index_rows import WALL_TIME

Points = tuple[NDArray[np.int64], NDArray[np.float64]]

SECONDS, TOKENS, SAMPLES = "axis/seconds", "axis/tokens", "axis/samples"
AXES = (SECONDS, TOKENS, SAMPLES)
_RATES = {TOKENS: ("tokens_per_second", "train/tokens_per_second"), SAMPLES: ("samples_per_second",)}
_DURATIONS = ("time/iteration", "train/time/step")


def positions(axis: str, series: Callable[[str], Points]) -> Points:
    """Steps, int64 [n], and for each the seconds since the first step began, or the tokens or samples of all steps so far, float64 [n].
    Empty where the run does not record what is needed.

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
