"""Delays double up to their bound, and jitter spreads them by half to each side."""

import pytest

from polyreme.process.backoff import Backoff


def test_delays_double_from_the_first_to_the_longest() -> None:
    backoff = Backoff(first=0.5, longest=8.0)
    assert [backoff.delay(attempt) for attempt in (1, 2, 3, 4, 5, 6, 10_000)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_jitter_spreads_a_delay_by_half_to_each_side() -> None:
    backoff = Backoff(first=2.0, longest=2.0)
    assert backoff.delay(1, 0.0) == 1.0
    assert backoff.delay(1, 0.999) == pytest.approx(3.0, abs=0.01)
    assert all(1.0 <= backoff.draw(attempt) < 3.0 for attempt in range(1, 100))
