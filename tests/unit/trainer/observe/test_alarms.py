"""Each alarm is tested on a history that must raise it, on a similar one that must not, and for its text."""

from collections import Counter
from dataclasses import replace

import pytest

from polyreme_trainer.observe.alarms import CONSTANT_FOR, SUSTAINED_FOR, Observation, announcements, check, is_repetitive

WELL = Observation(
    iteration=1,
    reward_min=0.0,
    reward_max=1.0,
    trained_samples=64,
    learning_rate=1e-4,
    changed_tensors=26,
    empty_fraction=0.0,
    repetitive_fraction=0.0,
    length_stop_fraction=0.1,
    mismatch_kl=1e-8,
)
LIMIT = 1e-4


def run_of(count: int, **changes: object) -> list[Observation]:
    return [replace(WELL, iteration=i + 1, **changes) for i in range(count)]  # type: ignore[arg-type]


def test_a_healthy_run_is_silent() -> None:
    for count in range(1, 30):
        assert check(run_of(count), LIMIT) == {}


def test_constant_reward() -> None:
    assert check(run_of(CONSTANT_FOR - 1, reward_min=0.0, reward_max=0.0), LIMIT) == {}
    found = check(run_of(CONSTANT_FOR, reward_min=0.0, reward_max=0.0), LIMIT)
    assert list(found) == ["constant_reward"]
    assert "since iteration 1" in found["constant_reward"]
    assert check([*run_of(CONSTANT_FOR, reward_min=0.0, reward_max=0.0), replace(WELL, iteration=9)], LIMIT) == {}


def test_unchanged_weights() -> None:
    found = check(run_of(1, changed_tensors=0), LIMIT)
    assert list(found) == ["unchanged_weights"]
    assert "lr 0.0001" in found["unchanged_weights"]
    assert check(run_of(1, changed_tensors=0, trained_samples=0), LIMIT) == {}  # nothing to learn from, which is not a fault
    assert check(run_of(1, changed_tensors=0, learning_rate=0.0), LIMIT) == {}


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [("empty_fraction", 0.6, "empty"), ("repetitive_fraction", 0.7, "cycle"), ("length_stop_fraction", 0.95, "max_new_tokens")],
)
def test_degenerate_output(field: str, value: float, word: str) -> None:
    assert check(run_of(SUSTAINED_FOR - 1, **{field: value}), LIMIT) == {}
    assert word in check(run_of(SUSTAINED_FOR, **{field: value}), LIMIT)["degenerate_output"]


def test_a_mismatch_above_the_limit() -> None:
    assert check(run_of(SUSTAINED_FOR - 1, mismatch_kl=2e-4), LIMIT) == {}
    assert "at least 0.0002" in check(run_of(SUSTAINED_FOR, mismatch_kl=2e-4), LIMIT)["growing_mismatch"]


def test_a_mismatch_that_grows_below_the_limit() -> None:
    early, late = run_of(SUSTAINED_FOR), run_of(SUSTAINED_FOR, mismatch_kl=5e-5)
    assert "rose from 1e-08" in check([*early, *late], LIMIT)["growing_mismatch"]
    assert check([*early, *run_of(SUSTAINED_FOR, mismatch_kl=1e-6)], LIMIT) == {}  # many times larger, but still rounding
    assert check([*run_of(SUSTAINED_FOR, mismatch_kl=4e-5), *late], LIMIT) == {}  # it was so from the start


def test_iterations_without_a_measurement_are_left_out() -> None:
    assert check(run_of(10, mismatch_kl=None), LIMIT) == {}


def test_repetition() -> None:
    assert is_repetitive([7] * 20)
    assert is_repetitive([1, 2, 3] * 10)
    assert not is_repetitive(list(range(40)))
    assert not is_repetitive([7] * 10)
    assert is_repetitive([5] * 40 + [1])  # the last token may be the stop token


def test_an_alarm_that_comes_and_goes_is_announced_ever_more_rarely() -> None:
    onsets: Counter[str] = Counter()
    texts = []
    for _ in range(1000):
        texts += announcements({"loud": "too loud"}, set(), onsets)
        assert not announcements({"loud": "too loud"}, {"loud"}, onsets), "it still holds"
    assert onsets["loud"] == 1000 and len(texts) == 10
    assert texts[0] == "too loud" and "512" in texts[-1]
    assert announcements({"loud": "too loud", "dark": "too dark"}, set(), onsets) == ["too dark"]
