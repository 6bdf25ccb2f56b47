"""A stage's progress, accumulated from its records, for summary.json and the terminal.

Invariant: pure, and of a bounded size however long the stage is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from polyreme.display.report import duration, loading_progress, replay

Record = dict[str, Any]

_NO_METRICS = ("run", "time", "kind", "step", "steps", "rows", "seconds")


@dataclass
class StageProgress:
    """The progress of a stage.

    Attributes:
        step, steps: the newest trained step, and the number of steps; both 0 before the first record.
        replayed: while the steps after the newest checkpoint are repeated after a resume, the newest that is; else None.
        loss: of that step.
        seconds: the time of all steps together.
        before, after: the first and the newest evaluation.
        hf_path: of the trained model.
        updated: Unix time in seconds of the newest record; None before the first.
        complete: whether the newest record is the stage's end.
    """

    step: int = 0
    steps: int = 0
    replayed: int | None = None
    loss: float | None = None
    seconds: float = 0.0
    before: Record | None = None
    after: Record | None = None
    hf_path: str | None = None
    updated: float | None = None
    complete: bool = False

    def add(self, record: Record) -> None:
        """Adds the next record."""
        self.complete, self.updated = record["kind"] == "done", record.get("time", self.updated)
        match record["kind"]:
            case "step":
                self.step, self.steps, self.loss = record["step"], record["steps"], record["loss"]
                self.seconds += record["time/step"]
                self.replayed = None
            case "resumed":
                self.replayed = record["step"] if record["step"] < self.step else None
            case "eval":
                self.after = {name: record[name] for name in ("step", "rows", *metrics_of(record))}
                self.before = self.before or self.after
            case "done":
                self.hf_path = record["hf_path"]

    def numbers(self) -> Record:
        """For summary.json."""
        return {
            "step": self.step,
            "steps": self.steps,
            "replayed": self.replayed,
            "loss": self.loss,
            "step_seconds": self.seconds,
            "eval_before": self.before,
            "eval_after": self.after,
            "hf_path": self.hf_path,
            "updated": self.updated,
        }


def metrics_of(record: Record) -> list[str]:
    """The names of an evaluation's metrics."""
    return [name for name in record if name not in _NO_METRICS]


def line_of(record: Record, trained: int = 0) -> str:
    """A record as a line for the terminal; empty for a record that is not shown. `trained`: the newest recorded step."""
    match record["kind"]:
        case "step":
            numbers = _numbers(record, ("loss", "accuracy", "rewards/accuracies", "rewards/margins", "tokens_per_second"))
            left = (record["steps"] - record["step"]) * record["time/step"]
            return f"step {record['step']}/{record['steps']}  {numbers}" + (f"  remaining about {duration(left)}" if left else "")
        case "resumed" if record["step"] < trained:
            return replay(record["step"], trained)
        case "loading":
            return loading_progress(record)
        case "eval":
            return f"held out after step {record['step']}  {_numbers(record, metrics_of(record))}"
        case "saved":
            return f"saved          {record['path']}"
        case "done":
            return f"done           {record['hf_path']}"
    return ""


def _numbers(record: Record, names: Iterable[str]) -> str:
    return "  ".join(f"{name} {record[name]:.4g}" for name in names if name in record)
