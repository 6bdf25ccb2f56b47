"""Dynamic sampling and pass rates."""

import numpy as np
import pytest

from polyreme_trainer.algorithms.filters import PassRate, SkipRule, informative, record


def test_groups_of_equal_scores_are_not_informative() -> None:
    scores = np.array([1.0, 0.0, 1.0, 1.0, 0.1 + 0.2, 0.3, 0.0])
    group = np.array([4, 4, 2, 2, 9, 9, 1])
    assert informative(scores, group).tolist() == [True, True, False, False, False, False, False]


def test_pass_rates_add_up() -> None:
    rates = record({}, 5, np.array([1.0, 0.0, 0.5]), threshold=0.5, data_pass=0)
    assert rates == {5: PassRate(samples=3, solved=1, last_pass=0)}
    more = record(rates, 5, np.array([1.0, 1.0]), threshold=0.5, data_pass=2)
    assert more == {5: PassRate(samples=5, solved=3, last_pass=2)}
    assert rates[5].samples == 3


@pytest.mark.parametrize(
    ("rate", "data_pass", "skipped"),
    [
        (PassRate(), 1, False),
        (PassRate(7, 0, 0), 1, False),  # too few to tell
        (PassRate(8, 0, 0), 1, True),
        (PassRate(8, 8, 0), 1, True),
        (PassRate(8, 4, 0), 1, False),
        (PassRate(8, 0, 0), 2, True),
        (PassRate(8, 0, 0), 3, False),  # asked again: the policy is another one by now
    ],
)
def test_what_is_always_or_never_solved_is_skipped_for_a_while(rate: PassRate, data_pass: int, skipped: bool) -> None:
    assert SkipRule(samples=8, never=True, always=True, passes=2).skips(rate, data_pass) is skipped


def test_either_side_may_be_kept() -> None:
    never, always = PassRate(8, 0, 0), PassRate(8, 8, 0)
    assert SkipRule(8, never=True, always=False, passes=9).skips(never, 1)
    assert not SkipRule(8, never=True, always=False, passes=9).skips(always, 1)
    assert not SkipRule(8, never=False, always=True, passes=9).skips(never, 1)
