"""A stage's records are written once, despite repetitions, and shown in TensorBoard."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.display.report import replay
from polyreme.rundir.reader.scalars import stage_scalars
from polyreme_trainer.launch.stage_progress import StageProgress, line_of
from polyreme_trainer.observe.stage_records import StageRecorder


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "steps": 4, "loss": loss, "time/step": 0.5, "tokens_per_second": 10.0}


def evaluation(number: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "step": number, "rows": 3, "seconds": 0.1, "loss": loss, "accuracy": 0.5}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tear(path: Path) -> None:
    """Appends a line that was cut off by the end of the process."""
    path.write_text(path.read_text() + '{"run": "run", "kind": "st')


async def test_a_restarted_stage_repeats_no_record(tmp_path: Path) -> None:
    first = StageRecorder(tmp_path, "run")
    for record in (evaluation(0, 3.0), step(1), step(2), evaluation(2, 2.0)):
        await first.emit(record)
    first.close()
    tear(tmp_path / "metrics.jsonl")
    second = StageRecorder(tmp_path, "run")
    for record in (evaluation(0, 9.0), step(1, 9.0), step(2, 9.0), evaluation(2, 9.0), step(3), {"kind": "saved", "step": 3}):
        await second.emit(record)
    second.close()
    found = [(record["kind"], record["step"]) for record in lines(tmp_path)]
    assert found == [("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("saved", 3)]
    assert not any(record.get("loss") == 9.0 for record in lines(tmp_path))


async def test_repeated_steps_are_visible_as_such(tmp_path: Path) -> None:
    first = StageRecorder(tmp_path, "run")
    for number in range(1, 5):
        await first.emit(step(number))
    first.close()
    now = 0.0
    second = StageRecorder(tmp_path, "run", clock=lambda: now)
    await second.emit({"kind": "resumed", "step": 1})
    for number, at in ((2, 1.0), (3, 8.0), (4, 9.0)):
        now = at
        await second.emit(step(number, 9.0))
    seen, said = StageProgress(), []
    for record in lines(tmp_path):
        seen.add(record)
        said += [line_of(record, seen.step)] * (record["kind"] == "resumed")
    assert said == [replay(1, 4), replay(3, 4)]
    assert (seen.step, seen.numbers()["replayed"]) == (4, 3)
    await second.emit(step(5))
    seen.add(lines(tmp_path)[-1])
    assert (seen.step, seen.numbers()["replayed"]) == (5, None)
    second.close()


async def test_another_stage_of_the_directory_starts_anew(tmp_path: Path) -> None:
    for run in ("one", "two"):
        recorder = StageRecorder(tmp_path, run)
        await recorder.emit(step(1))
        recorder.close()
    assert [record["run"] for record in lines(tmp_path)] == ["one", "two"]


def test_tensorboard_shows_the_numbers_of_steps_and_evaluations() -> None:
    assert list(stage_scalars({"time": 1.0, "run": "r", **evaluation(2, 2.0)})) == [
        ("eval/loss", 2.0, 2),
        ("eval/accuracy", 0.5, 2),
    ]
    assert ("train/loss", 1.0, 1) in list(stage_scalars({"time": 1.0, **step(1)}))
    saved = {"time": 1.0, "kind": "saved", "step": 1, "path": "there", "seconds": 0.1, "stall_seconds": 0.01}
    assert list(stage_scalars(saved)) == [("checkpoint/seconds", 0.1, 1), ("checkpoint/stall_seconds", 0.01, 1)]


def test_progress_has_the_first_and_the_newest_evaluation() -> None:
    progress = StageProgress()
    for record in (evaluation(0, 3.0), step(1), step(2, 0.5), evaluation(2, 2.0)):
        progress.add(record)
    numbers = progress.numbers()
    assert (numbers["step"], numbers["steps"], numbers["loss"], numbers["step_seconds"]) == (2, 4, 0.5, 1.0)
    assert numbers["eval_before"]["loss"] == 3.0 and numbers["eval_after"] == {"step": 2, "rows": 3, "loss": 2.0, "accuracy": 0.5}
    assert not progress.complete and numbers["updated"] is None
    progress.add({"time": 9.0, "kind": "done", "step": 4, "hf_path": "/there"})
    assert progress.complete and progress.numbers()["hf_path"] == "/there" and progress.numbers()["updated"] == 9.0
    progress.add(step(5))
    assert not progress.complete


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (step(1), ("step 1/4", "loss 1")),
        (evaluation(2, 2.0), ("after step 2", "accuracy 0.5")),
        ({"kind": "saved", "step": 1, "path": "/there"}, ("/there",)),
        ({"kind": "gate", "name": "x"}, ()),
    ],
)
def test_a_line_has_the_records_numbers(record: dict[str, Any], words: tuple[str, ...]) -> None:
    line = line_of(record)
    assert all(word in line for word in words) and bool(line) == bool(words)
