"""The detection of stragglers: arithmetic, and runs with a silent and a slow replica."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.replicas.straggler_detection import Pace, stragglers


class Clock:
    """Replicas that send `rate` tokens per second and sample, in chunks of 16. At a rate of 0 they send nothing."""

    def __init__(self, *rates: float, sequences: int = 4) -> None:
        self.now, self.rates = 1000.0, list(rates)
        self.paces = {f"r{i}": Pace() for i in range(len(rates))}
        self._owed = [0.0] * len(rates)
        for one in self.paces.values():
            one.change(sequences, self.now)

    def run(self, seconds: float) -> dict[str, str]:
        """Runs for `seconds` and returns the findings."""
        found: dict[str, str] = {}
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for i, one in enumerate(self.paces.values()):
                self._owed[i] += 0.5 * self.rates[i]
                while self._owed[i] >= 16:
                    self._owed[i] -= 16
                    for _ in range(one.sequences):
                        one.arrived(16, self.now)
                        one.chunk_after(16 / self.rates[i])
            found |= stragglers(self.paces, self.now)
        return found


def test_a_silent_replica_is_found_within_seconds() -> None:
    clock = Clock(100, 100, 100)
    assert clock.run(30) == {}
    clock.rates[1] = 0
    found = clock.run(4)
    assert list(found) == ["r1"] and "sent nothing for" in found["r1"]


def test_a_slow_replica_is_found() -> None:
    found = Clock(100, 15, 90).run(25)
    assert list(found) == ["r1"] and "tokens/s" in found["r1"]
    assert Clock(100, 25, 90).run(60) == {}


def test_slow_models_are_given_the_time_that_all_of_them_take() -> None:
    clock = Clock(4, 4, 4)  # a chunk every four seconds
    assert clock.run(60) == {}
    clock.rates[0] = 0
    assert clock.run(35) == {}
    assert list(clock.run(10)) == ["r0"]


def test_a_long_first_answer_and_long_swaps_are_usual_when_they_are() -> None:
    for wait in ("first", "stall"):
        clock = Clock(100, 100)
        clock.run(5)
        setattr(clock.paces["r1"], wait, 4.0)
        clock.rates[0] = 0
        assert clock.run(11) == {}
        assert list(clock.run(3)) == ["r0"]


def test_all_silent_or_one_alone_is_nobody() -> None:
    clock = Clock(100, 100, 100)
    clock.run(15)
    clock.rates = [0, 0, 0]
    assert clock.run(100) == {}
    alone = Clock(100)
    alone.run(15)
    alone.rates = [0]
    assert alone.run(100) == {}


def test_time_in_which_nobody_listened_does_not_count() -> None:
    clock = Clock(100, 100)
    clock.run(15)
    clock.now += 60
    for one in clock.paces.values():
        one.reset(clock.now)
    assert clock.run(15) == {}


@given(
    st.lists(st.floats(1, 500), min_size=1, max_size=6), st.integers(1, 8), st.floats(1, 40)
)  # fmt: skip
def test_like_among_like_is_never_left_behind(rates: list[float], sequences: int, seconds: float) -> None:
    slowest = min(rates)
    alike = [slowest * (1 + (rate - slowest) / 500) for rate in rates]  # up to twice as fast
    assert Clock(*alike, sequences=sequences).run(seconds) == {}


@given(st.lists(st.none() | st.floats(1, 500), min_size=1, max_size=6), st.floats(0.1, 10))
def test_a_slow_one_is_compared_with_the_median_of_the_others(others: list[float | None], slow: float) -> None:
    paces = {f"r{place}": Pace(rate=rate) for place, rate in enumerate(others)} | {"slow": Pace()}
    for pace in paces.values():
        pace.change(1, 0.0)
    stragglers(paces, 0.0)  # begins the window
    for pace, rate in zip(paces.values(), (*others, slow), strict=True):
        if rate is not None:
            pace.arrived(round(1000 * rate), 1000.0)
    found = stragglers(paces, 1000.0)
    usual = median(round(1000 * (rate or 0.0)) / 1000 for rate in others)
    is_slow = usual >= 64 / 1000 and round(1000 * slow) / 1000 < 0.2 * usual
    assert ("slow" in found) == is_slow
    assert not is_slow or found["slow"].endswith(f"those of its peers {usual:.3g}")
