"""A stage's records are written once, despite repetitions, and shown in TensorBoard."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.display.report import plain_line, replay
from polyreme.rundir.progress import Progress
from polyreme.rundir.reader.scalars import scalars
from polyreme_trainer.observe.records import Recorder
from support.record_lines import read_known


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "steps": 4, "loss": loss, "time/step": 0.5, "tokens_per_second": 10.0}


def evaluation(number: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "rows": 3, "seconds": 0.1, "loss": loss, "accuracy": 0.5}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tear(path: Path) -> None:
    """Appends a line that was cut off by the end of the process."""
    path.write_text(path.read_text() + '{"run": "run", "kind": "st')


def test_a_restarted_stage_repeats_no_record(tmp_path: Path) -> None:
    first = Recorder.open(tmp_path, "run")
    for record in (evaluation(0, 3.0), step(1), step(2), evaluation(2, 2.0)):
        first.add(read_known(record))
    first.close()
    tear(tmp_path / "metrics.jsonl")
    second = Recorder.open(tmp_path, "run")
    for record in (
        evaluation(0, 9.0),
        step(1, 9.0),
        step(2, 9.0),
        evaluation(2, 9.0),
        step(3),
        {"kind": "saved", "step": 3, "path": "p"},
    ):
        second.add(read_known(record))
    second.close()
    found = [(record["kind"], record["step"]) for record in lines(tmp_path)]
    assert found == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("saved", 3)]
    assert not any(record.get("loss") == 9.0 for record in lines(tmp_path))


def test_repeated_steps_are_visible_as_such(tmp_path: Path) -> None:
    first = Recorder.open(tmp_path, "run")
    for number in range(1, 5):
        first.add(read_known(step(number)))
    first.close()
    now = 0.0
    second = Recorder.open(tmp_path, "run", clock=lambda: now)
    second.add(read_known({"kind": "resumed", "step": 1}))
    for number, at in ((2, 1.0), (3, 8.0), (4, 9.0)):
        now = at
        second.add(read_known(step(number, 9.0)))
    seen, said = Progress(0), []
    for record in lines(tmp_path):
        seen.add(record)
        said += [plain_line(record, seen, seen.steps)] * (record["kind"] == "resumed")
    assert said == [replay(1, 4), replay(3, 4)]
    assert (seen.newest, seen.replayed) == (4, 3)
    second.add(read_known(step(5)))
    seen.add(lines(tmp_path)[-1])
    assert (seen.newest, seen.replayed) == (5, None)
    second.close()


def test_another_stage_of_the_directory_starts_anew(tmp_path: Path) -> None:
    for run in ("one", "two"):
        recorder = Recorder.open(tmp_path, run)
        recorder.add(read_known(step(1)))
        recorder.close()
    assert [record["run"] for record in lines(tmp_path)] == ["one", "two"]


def test_tensorboard_shows_the_numbers_of_steps_and_evaluations() -> None:
    assert list(scalars({"time": 1.0, "run": "r", **evaluation(2, 2.0)})) == [("eval/loss", 2.0, 2), ("eval/accuracy", 0.5, 2)]
    assert ("train/loss", 1.0, 1) in list(scalars({"time": 1.0, **step(1)}))
    saved = {"time": 1.0, "kind": "saved", "step": 1, "path": "there", "seconds": 0.1, "stall_seconds": 0.01}
    assert list(scalars(saved)) == [("checkpoint/seconds", 0.1, 1), ("checkpoint/stall_seconds", 0.01, 1)]


def test_progress_has_the_first_and_the_newest_evaluation() -> None:
    progress = Progress(0)
    for record in (evaluation(0, 3.0), step(1), step(2, 0.5), evaluation(2, 2.0)):
        progress.add({"time": 8.0, **record})
    numbers = progress.stage_summary()
    assert (numbers["step"], numbers["steps"], numbers["loss"], numbers["step_seconds"]) == (2, 4, 0.5, 1.0)
    assert numbers["eval_before"]["loss"] == 3.0 and numbers["eval_after"] == {"step": 2, "rows": 3, "loss": 2.0, "accuracy": 0.5}
    assert not progress.complete and numbers["updated"] == 8.0
    progress.add({"time": 9.0, "kind": "done", "step": 4, "hf_path": "/there"})
    assert progress.complete and progress.stage_summary()["hf_path"] == "/there" and progress.stage_summary()["updated"] == 9.0
    progress.add({"time": 10.0, **step(5)})
    assert not progress.complete


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (step(1), ("step 1/4", "loss 1")),
        (evaluation(2, 2.0), ("after step 2", "accuracy 0.5")),
        ({"kind": "saved", "step": 1, "path": "/there"}, ("/there",)),
        ({"kind": "replayed", "name": "x"}, ()),
    ],
)
def test_a_line_has_the_records_numbers(record: dict[str, Any], words: tuple[str, ...]) -> None:
    line = plain_line(record, Progress(0), 4) or ""
    assert all(word in line for word in words) and bool(line) == bool(words)
