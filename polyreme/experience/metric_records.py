"""The records of a run or a stage: what happened, in its stream `metrics` and in metrics.jsonl.

Invariant: `fields_of` is the only writer and `read_record` the only reader of a record's JSON object. A field without a value is
left out. A field that an older release's record lacks has its default, and a kind that this release does not know is no record.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

MetricValues = Mapping[str, Any]
"""Metric name to number, a few to a list of counts; None where a metric was not measured."""
Line = dict[str, Any]
"""The JSON object of a record, as it is stored. `read_record` makes it a record."""

ENVELOPE = ("run", "id", "kind", "time")
"""What every line has beside the fields of its kind: the run, the place in its stream, the kind, the Unix time in seconds."""

_KINDS: defaultdict[str, list["type[MetricRecord]"]] = defaultdict(list)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class MetricRecord:
    """A record. Each subclass becomes such a dataclass.

    Attributes:
        time: Unix time in seconds at which it was written, or happened; 0: not yet written.
    """

    kind: ClassVar[str] = ""
    time: float = 0.0

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)
        if kind:
            cls.kind = kind
            _KINDS[kind].append(cls)


class _Numbered(MetricRecord):
    """A record with metrics, which are fields of its JSON object: numbers by name, and what else is shown with them."""

    metrics: MetricValues = field(default_factory=dict)


class _Placed(MetricRecord):
    """A record about an iteration of a run, or a step of a stage."""

    iteration: int | None = None
    step: int | None = None

    @property
    def number(self) -> int:
        """The iteration or the step."""
        number = self.step if self.iteration is None else self.iteration
        assert number is not None, f"a record {self.kind} has an iteration or a step"
        return number


class Started(MetricRecord, kind="start"):
    """A run starts or resumes. `start`: the count of its starts."""

    start: int
    forked_from: Mapping[str, object] | None = None


class Resumed(_Placed, kind="resumed"):
    """Training continues from a checkpoint. What has a record already is repeated."""


class WarmStartStep(MetricRecord, kind="sft"):
    """Supervised steps of a warm start are done. `loss` is None where it is not finite."""

    phase: int
    step: int
    steps: int
    loss: float | None
    lr: float | None = None
    tokens_per_second: float = 0.0


class WarmStartSaved(MetricRecord, kind="sft_saved"):
    """A checkpoint between the phases of a warm start is complete. `step`: of all phases."""

    step: int
    path: str
    seconds: float
    stall_seconds: float


class WarmStartDone(MetricRecord, kind="sft_done"):
    """The warm start is complete."""

    seconds: float


class GateMeasured(MetricRecord, kind="gate"):
    """Two of learner, replica and exported model were compared."""

    name: str
    value: float
    limit: float


class IterationTrained(_Numbered, kind="iteration"):
    """An iteration is trained. `alarms`: those that hold; `repeated`, `next_group`: added by the recorder."""

    iteration: int
    alarms: Sequence[str] = field(default_factory=list)


class GroupsPlanned(_Numbered, kind="rollout"):
    """An iteration is planned. `groups`: how many each of several orchestrators brought into the log since the plan before."""

    iteration: int
    groups: Sequence[int] | None = None


class EngineStart(MetricRecord, kind="engine_start"):
    """A replica starts its engine, and with `seconds`, has started it."""

    host: str
    pid: int = 0
    engine: str
    seconds: float | None = None


class EngineEnd(MetricRecord, kind="engine_end"):
    """A replica's engine has ended for the learner. `freed_bytes`: memory that only its processes had."""

    host: str
    pid: int
    freed_bytes: int


class VersionServed(_Numbered, kind="commit"):
    """A replica has taken a version."""

    replica: str
    version: int


class ReplicasChanged(MetricRecord, kind="replicas"):
    """Replicas have joined or left. `replicas`: the /v1 address of each by id."""

    replicas: Mapping[str, str]


class Evaluation(_Numbered, kind="eval"):
    """A version of a run is evaluated.

    Attributes:
        metrics: the means, and the metrics over several answers; those of a named set begin with SET/.
        parts: mean of each reward on the set without a name.
        samples, seconds: number of prompts, and the duration.
        examples: the first answers.
        held_out: digest of the prompts that decide about the best version.
        result: name and value of the deciding metric, unless it is the mean.
    """

    version: int
    parts: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0
    examples: Sequence[Mapping[str, object]] = field(default_factory=list)
    held_out: str | None = None
    result: Line | None = None


class EvaluationProgress(MetricRecord, kind="eval_progress"):
    """A part of a long evaluation's answers is there."""

    version: int
    answered: int
    asked: int
    seconds_left: float


class EvaluationFailed(MetricRecord, kind="eval_failed"):
    """An evaluation failed or was skipped."""

    version: int
    text: str


class Loading(MetricRecord, kind="loading"):
    """A fraction of a role's weights is loaded."""

    role: str
    fraction: float
    seconds_left: float


class CheckpointSaved(_Placed, kind="saved"):
    """A checkpoint is complete. `seconds`: of writing; `stall_seconds`: the pause of training."""

    path: str
    hf_path: str | None = None
    seconds: float | None = None
    stall_seconds: float | None = None


class Alarm(MetricRecord, kind="alarm"):
    """A metric needs attention."""

    text: str


class ServiceNotice(MetricRecord, kind="notice"):
    """An event of a service needs attention. `waiting`: it says what the run waits for, until groups are planned."""

    service: str
    text: str
    waiting: bool = False


class Restart(MetricRecord, kind="restart"):
    """A process is restarted."""

    process: str
    text: str = ""


class TrackerFailed(MetricRecord, kind="tracker_failed"):
    """A tracker has failed. `failures`: how often since the start."""

    tracker: str
    failures: int
    text: str = ""


class DoneLearning(MetricRecord, kind="done_learning"):
    """The last iteration is saved."""


class StageStep(_Numbered, kind="step"):
    """A step of a stage is done, or of a client of the training service. `steps`: 0 if the client decides when it ends."""

    step: int
    steps: int = 0


class SamplesServed(MetricRecord, kind="samples"):
    """A model of the training service has answered requests. `file`: of their samples; `next_group`: above the groups in it;
    `dropped`: files that are deleted for it."""

    file: str
    samples: int
    tokens: int
    next_group: int
    dropped: Sequence[str] = field(default_factory=list)


class StageEvaluation(_Numbered, kind="eval"):
    """The held-out rows of a stage were measured after `step`."""

    step: int
    rows: int = 0
    seconds: float = 0.0


class StageDone(MetricRecord, kind="done"):
    """A stage is complete. `hf_path`: the trained model."""

    step: int
    hf_path: str


def fields_of(record: MetricRecord) -> dict[str, object]:
    """The JSON object of a record, its kind first and its metrics last."""
    found = {each.name: getattr(record, each.name) for each in fields(record) if each.name != "metrics"}
    if not record.time:
        del found["time"]
    metrics = record.metrics if isinstance(record, _Numbered) else {}
    return {"kind": record.kind, **{name: value for name, value in found.items() if value is not None}, **metrics}


def read_record(line: Line) -> MetricRecord | None:
    """The record of a JSON object, which may have the fields of `ENVELOPE`; None for an unknown kind."""
    for record in _KINDS.get(str(line.get("kind")), ()):
        known = {each.name: each for each in fields(record) if each.name != "metrics"}
        required = [name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
        if all(name in line for name in required):
            values = {name: line[name] for name in known if name in line}
            if issubclass(record, _Numbered):
                values["metrics"] = {name: value for name, value in line.items() if name not in known and name not in ENVELOPE}
            return record(**values)
    return None
