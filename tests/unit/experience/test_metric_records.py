"""Records keep their values through JSON, and the page about them names every kind and field."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from polyreme.experience.metric_records import (
    CheckpointSaved,
    Evaluation,
    IterationTrained,
    MetricRecord,
    Resumed,
    StageEvaluation,
    StageStep,
    fields_of,
    read_record,
)

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "records.md").read_text()


def kinds(of: type[MetricRecord] = MetricRecord) -> Iterator[type[MetricRecord]]:
    for each in of.__subclasses__():
        yield from [each] if each.kind else []
        yield from kinds(each)


@pytest.mark.parametrize(
    "record",
    [
        IterationTrained(iteration=3, time=9.0, alarms=["a"], metrics={"reward/mean": 0.5, "staleness/samples": [1, 2]}),
        Evaluation(version=2, metrics={"accuracy": 0.5, "hard/pass@2": 0.7}, held_out="a1", parts={"exact": 0.4}),
        StageEvaluation(step=2, rows=3, metrics={"loss": 0.5}),
        StageStep(step=2, steps=4, metrics={"loss": None}),
        CheckpointSaved(step=4, path="p"),
        Resumed(iteration=4),
    ],
)
def test_a_record_is_read_as_it_was_written(record: MetricRecord) -> None:
    line = {"run": "r", "id": "1-0", **json.loads(json.dumps(fields_of(record)))}
    assert read_record(line) == record


@pytest.mark.parametrize("line", [{}, {"kind": "of a later release", "x": 1}, {"kind": "alarm"}, {"kind": ["eval"]}])
def test_what_is_no_record_of_this_release_is_none(line: dict[str, object]) -> None:
    assert read_record(line) is None


def test_the_page_names_every_kind_and_its_fields() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for record in kinds():
        about = " ".join(row for row in rows if f"`{record.kind}`" in row.split(" | ")[0])
        named = {each.name for each in fields(record)} - {"time", "metrics"}
        assert not (missing := {name for name in named if f"`{name}`" not in about}), (record.kind, missing)
