"""Lines of metrics.jsonl in tests."""

from typing import Any

from polyreme.experience.metric_records import Evaluation, MetricRecord, read_record


def read_evaluation(line: dict[str, Any]) -> Evaluation:
    """The record of a run's evaluation."""
    record = read_record({"kind": "eval", "version": 0, **line})
    assert isinstance(record, Evaluation)
    return record


def read_known(line: dict[str, Any]) -> MetricRecord:
    """The record of a line."""
    record = read_record(line)
    assert record is not None, f"no record: {line}"
    return record
