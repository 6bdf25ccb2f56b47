"""Which records of a run are worth a notice, and its content.

Invariant: pure; a record gives at most one notice. The first evaluated version is only the basis of later comparisons, so it is
not a new best. The same holds for the first version with another metric, which a resume may have chosen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from polyreme.config.notices import Event
from polyreme.experience.metric_records import Alarm, Evaluation, Line, MetricRecord, StageEvaluation, read_record
from polyreme.experience.run import RunState
from polyreme.rundir.evaluations import comparable, evaluation_of

_ENDS: Mapping[RunState, Event] = {RunState.DONE: "done", RunState.STOPPED: "stopped", RunState.FAILED: "failed"}


@dataclass(frozen=True)
class Notice:
    """A notice, which a receiver gets as one JSON object.

    Attributes:
        event: what happened.
        run, name, run_dir: id, name and directory of the run.
        time: Unix time in seconds.
        text: one sentence that describes the event.
        facts: further values: `version` (of a stage: `step`), `metric`, `value` of a new best; `reason` of an end.
    """

    event: Event
    run: str
    name: str
    run_dir: str
    time: float
    text: str
    facts: Mapping[str, object] = field(default_factory=dict)

    def payload(self) -> dict[str, object]:
        """The object, with the facts next to the other values."""
        values = asdict(self)
        return {**values.pop("facts"), **values}


class NoticeRules:
    """Turns the records of one run into notices.

    Args:
        run_id, name, run_dir: of the run.
        newest: the newest evaluation of a run that is resumed.
        best: the best result that is comparable with it; of a stage, its lowest held-out loss.
    """

    def __init__(self, run_id: str, name: str, run_dir: str, newest: Evaluation | None = None, best: float | None = None) -> None:
        self._run, self._newest, self._best = (run_id, name, run_dir), newest, best

    def of_records(self, lines: Iterable[Line]) -> list[Notice]:
        """The notices about new records, in order. Each record has its `time`."""
        return [notice for line in lines if (notice := self._of_record(read_record(line)))]

    def of_end(self, state: RunState, reason: str, time: float) -> Notice:
        """The notice about the run's end."""
        text = f"{self._run[1]} {'is done' if state is RunState.DONE else f'{state}: {reason}'}"
        return Notice(_ENDS[state], *self._run, time, text, {"reason": reason})

    def _of_record(self, record: MetricRecord | None) -> Notice | None:
        if isinstance(record, Alarm):
            return Notice("alarm", *self._run, record.time, f"{self._run[1]}: alarm: {record.text}")
        if isinstance(record, StageEvaluation):
            before, loss = self._best, record.metrics["loss"]
            self._best = loss if before is None else min(loss, before)
            if before is not None and loss < before:
                text = (
                    f"{self._run[1]}: held-out loss {loss:.3f} after step {record.step}, the best so far (before: {before:.3f})"
                )
                facts = {"step": record.step, "metric": "loss", "value": loss}
                return Notice("best", *self._run, record.time, text, facts)
        elif isinstance(record, Evaluation):
            metric, value = evaluation_of(record)
            before = self._best if self._newest and comparable(record, self._newest) else None
            self._newest, self._best = record, value if before is None else max(value, before)
            if before is not None and value > before:
                text = f"{self._run[1]}: {metric} {value:.3f} at version {record.version}, the best so far (before: {before:.3f})"
                facts = {"version": record.version, "metric": metric, "value": value}
                return Notice("best", *self._run, record.time, text, facts)
        return None
