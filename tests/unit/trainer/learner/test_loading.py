"""How far weights are loaded is recorded once in a while, and at the end only after such a record."""

from polyreme_trainer.learner.loading import REPORT_SECONDS, LoadingPace


def test_a_long_load_is_reported_until_it_is_over() -> None:
    pace = LoadingPace(began=100.0, reported=100.0)
    assert pace.at(0.1, 101.0) is None
    record = pace.at(0.25, 100.0 + REPORT_SECONDS)
    assert record == {"kind": "loading", "fraction": 0.25, "seconds_left": 3 * REPORT_SECONDS}
    assert pace.at(0.3, 101.0 + REPORT_SECONDS) is None
    assert pace.at(1.0, 102.0 + REPORT_SECONDS) == {"kind": "loading", "fraction": 1.0, "seconds_left": 0.0}


def test_a_short_load_is_not_reported() -> None:
    pace = LoadingPace(began=100.0, reported=100.0)
    assert pace.at(0.5, 101.0) is None and pace.at(1.0, 102.0) is None
