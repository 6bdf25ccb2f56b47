"""The progress of loading weights is recorded at intervals, and at the end only after such a record."""

from polyreme.display.report import loading_progress
from polyreme.experience.loading import REPORT_SECONDS, LoadingPace, reports_to
from polyreme.experience.metric_records import Loading


def test_a_long_load_is_reported_until_it_is_over() -> None:
    pace = LoadingPace(began=100.0, reported=100.0)
    assert pace.at("actor", 0.1, 101.0) is None
    record = pace.at("actor", 0.25, 100.0 + REPORT_SECONDS)
    assert record == Loading(role="actor", fraction=0.25, seconds_left=3 * REPORT_SECONDS)
    assert pace.at("actor", 0.3, 101.0 + REPORT_SECONDS) is None
    assert pace.at("actor", 1.0, 102.0 + REPORT_SECONDS) == Loading(role="actor", fraction=1.0, seconds_left=0.0)


def test_a_short_load_is_not_reported() -> None:
    pace = LoadingPace(began=100.0, reported=100.0)
    assert pace.at("actor", 0.5, 101.0) is None and pace.at("actor", 1.0, 102.0) is None


def test_each_role_has_a_pace_of_its_own() -> None:
    records = list[Loading]()
    loads = reports_to(records.append, 0.0)
    for role in ("model", "reference"):
        loaded = loads(role)
        assert loaded is not None
        loaded(0.5)
    assert [(record.role, record.fraction) for record in records] == [("model", 0.5), ("reference", 0.5)]
    assert loading_progress(records[0]).startswith("loading the model: 50%, remaining about 0:0")
