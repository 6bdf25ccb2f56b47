"""Long series are reduced to few points, which keep the lowest and the highest value of each bucket."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyreme.rundir.reader.series import downsample

NUMBERS = st.floats(-1e6, 1e6)


@given(st.lists(NUMBERS, max_size=300), st.integers(1, 40))
def test_a_curve_has_few_points_and_keeps_every_peak(values: list[float], points: int) -> None:
    steps, series = np.arange(1, len(values) + 1), np.array(values)
    curve = downsample(steps, series, points)
    assert len(curve.steps) == min(points, len(values))
    assert (np.diff(curve.steps) > 0).all()
    assert (curve.low <= curve.mean + 1e-6).all() and (curve.mean <= curve.high + 1e-6).all()
    if values:
        assert curve.steps[-1] == len(values)
        assert curve.low.min() == min(values) and curve.high.max() == max(values)


def test_a_short_series_stays_as_it_is() -> None:
    curve = downsample(np.array([3, 7]), np.array([0.5, -1.0]), 10)
    assert curve.steps.tolist() == [3, 7]
    assert curve.mean.tolist() == curve.low.tolist() == curve.high.tolist() == [0.5, -1.0]
