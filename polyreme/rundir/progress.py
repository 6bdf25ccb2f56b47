"""The progress of a run or a stage, accumulated from its metric records. The live view, the summary and the exporter read it.

Invariant: a pure function of the records in stream order, without a clock or I/O, in bounded memory: it keeps sums and the newest
records. An iteration counts once, as does a stage's step. A resumed learner repeats iterations from the log; only the first
record counts, since a repetition does not wait for samples and its rates are meaningless.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TypeVar

from polyreme.experience.metric_records import (
    Alarm,
    CheckpointSaved,
    DoneLearning,
    EngineStart,
    Evaluation,
    EvaluationFailed,
    EvaluationProgress,
    GateMeasured,
    GroupsPlanned,
    IterationTrained,
    Line,
    Loading,
    MetricRecord,
    ReplicasChanged,
    Restart,
    Resumed,
    ServiceNotice,
    StageDone,
    StageEvaluation,
    StageStep,
    Started,
    TrackerFailed,
    VersionServed,
    WarmStartDone,
    WarmStartStep,
    read_record,
)
from polyreme.experience.shard import role_of
from polyreme.rundir.evaluations import comparable, evaluation_of
from polyreme.rundir.learning import Learning

SPLIT = {"waiting for samples": "time/learner_wait", "training": "time/train", "writing weights": "time/write"}
"""Parts of an iteration's wall time, with the record key of each. The remainder is overhead."""
RECENT = 64
"""Number of newest iterations whose records are kept."""
LOADING_SECONDS = 60.0
"""Seconds for which a load without a further record is shown while iterations are trained: its process may be gone."""
NOTICE_SECONDS = 300.0
"""Seconds for which a notice or an alarm is shown."""


def stream_time(stream_id: str) -> float:
    """Unix time in seconds at which Redis received an entry. The first half of its id is that time in milliseconds."""
    return int(stream_id.partition("-")[0]) / 1000


@dataclass
class Progress:
    """The state of a run or a stage as far as its records show it. Times are Unix seconds, durations are seconds.

    Attributes:
        recent: the records of the newest iterations, oldest first.
        first, newest: the first iteration (above 1 for a fork) and the newest, of a stage the newest step; 0 before any record.
        iterations: number of recorded iterations.
        evaluations: result by version. `metric` is its name, `evaluation` the record of the newest version. A result that is not
            `comparable`, since a resume may have other held-out data or another `eval_best`, replaces all of them.
        evaluating: the newest `eval_progress` record of an evaluation that is not over.
        loading: the newest `loading` record of each role whose weights are being loaded.
        engine_start: the newest `engine_start` record, until a replica has registered.
        failed_evaluations: reason by version, for the newest failures.
        versions: served version by replica.
        replicas: URL of /v1 by replica, for the registered replicas.
        replayed: while a resumed learner repeats iterations from the log, the newest that it has; else None.
        starts: number of starts of the run; `started` is the time of the newest one.
        restarts: number of restarts by process since the newest start.
        tracker_failures: number of failures by tracker since the newest start.
        steps, loss: a stage's number of steps, and the loss of its newest one; 0 and None before the first record.
        held_out: a stage's first and newest evaluation; empty before the first.
        hf_path: a stage's trained model, once it is written.
        complete: whether the newest record is a stage's end.
    """

    samples_per_iteration: int
    time: float = 0.0
    recent: deque[IterationTrained] = field(default_factory=lambda: deque(maxlen=RECENT))
    first: int = 0
    newest: int = 0
    iterations: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)
    metric: str = "accuracy"
    evaluation: Evaluation | None = None
    evaluating: EvaluationProgress | None = None
    loading: dict[str, Loading] = field(default_factory=dict)
    engine_start: EngineStart | None = None
    failed_evaluations: dict[int, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    replayed: int | None = None
    starts: int = 0
    started: float | None = None
    forked_from: Mapping[str, object] | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    alarms: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=5))
    alarm_count: int = 0
    notices: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=5))
    tracker_failures: dict[str, int] = field(default_factory=dict)
    gates: dict[str, GateMeasured] = field(default_factory=dict)
    sft: WarmStartStep | None = None
    _sft_first: WarmStartStep | None = None
    sft_seconds: float = 0.0
    saved: CheckpointSaved | None = None
    rollout: GroupsPlanned | None = None
    waiting: str = ""
    learning: Learning = field(default_factory=Learning)
    steps: int = 0
    loss: float | None = None
    held_out: list[StageEvaluation] = field(default_factory=list)
    hf_path: str | None = None
    complete: bool = False
    _seconds: float = 0.0
    _split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SPLIT, 0.0))
    _waits: dict[int, float] = field(default_factory=dict)
    _wait_seconds: float = 0.0
    _planned: float | None = None
    _newest_wait: int = 0
    _staleness: list[int] = field(default_factory=list)
    _mismatch: float | None = None

    def repeats(self, line: Line) -> bool:
        """Whether the record repeats an iteration, or a stage's step or evaluation, that has been counted."""
        return self._repeats(read_record(line))

    def _repeats(self, record: MetricRecord | None) -> bool:
        match record:
            case IterationTrained(iteration=number) | StageStep(step=number):
                return number <= self.newest
            case StageEvaluation(step=number):
                return bool(self.held_out) and number <= self.held_out[-1].step
        return False

    def add(self, line: Line) -> None:
        """Adds the next record with a `time`. Ignores unknown kinds; a repeated iteration or step is only noted as `replayed`."""
        record = read_record(line)
        self.complete = isinstance(record, StageDone)
        match record:
            case Started():
                self._start(record)
            case IterationTrained() if not self._repeats(record):
                self._iterate(record)
            case StageStep() if not self._repeats(record):
                self.newest, self.steps, self.loss, self.replayed = record.step, record.steps, record.metrics["loss"], None
                self._seconds += record.metrics["time/step"]
            case IterationTrained(iteration=number) | StageStep(step=number) | Resumed(number=number):
                self.replayed = number if number < self.newest else None
            case StageEvaluation():
                self.held_out = [*self.held_out[:1], record]
            case StageDone():
                self.hf_path = record.hf_path
            case GroupsPlanned():
                self.waiting = ""
                self._wait(record)
            case Evaluation():
                self.evaluating = None
                self._evaluate(record)
            case EvaluationProgress():
                self.evaluating = record
            case Loading():
                self.loading.pop(record.role, None)
                if record.fraction < 1:
                    self.loading[record.role] = record
            case EngineStart():
                self.engine_start = record
            case EvaluationFailed():
                self.evaluating = None
                self.failed_evaluations[record.version] = record.text
                _keep_newest(self.failed_evaluations)
            case VersionServed():
                self.versions[record.replica] = record.version
            case ReplicasChanged():
                self.replicas = dict(record.replicas)
                self.versions = {name: version for name, version in self.versions.items() if name in self.replicas}
                self.engine_start = None if self.replicas else self.engine_start
            case Restart():
                self.restarts[record.process] = self.restarts.get(record.process, 0) + 1
                self.loading, self.engine_start = {}, None
            case WarmStartStep():
                same = self._sft_first is not None and self._sft_first.phase == record.phase
                self._sft_first, self.sft = self._sft_first if same else record, record
            case WarmStartDone():
                self.sft, self.sft_seconds = None, record.seconds
            case CheckpointSaved():
                self.saved = record
            case Alarm():
                self.alarms.append((record.time, record.text))
                self.alarm_count += 1
            case ServiceNotice():
                self.notices.append((record.time, f"{record.service}: {record.text}"))
                self.waiting = record.text if record.waiting else self.waiting
            case TrackerFailed():
                self.tracker_failures[record.tracker] = record.failures
            case GateMeasured():
                self.gates[record.name] = record
            case DoneLearning():
                pass  # its time counts
            case _:
                return
        self.time = max(self.time, record.time)

    @property
    def last(self) -> IterationTrained | None:
        """The record of the newest iteration."""
        return self.recent[-1] if self.recent else None

    def score(self, first: bool = False) -> float | None:
        """Result of the newest evaluation, or of the first one, before training; `metric` is its name."""
        if not self.evaluations:
            return None
        version = (min if first else max)(self.evaluations)
        return None if first and version >= self.first > 0 else self.evaluations[version]

    def score_after(self) -> float | None:
        """Result of the newest version, or None when it was not evaluated. An older version's result does not replace it."""
        return self.evaluations.get(self.newest) if self.iterations else None

    def orchestrators(self) -> dict[str, dict[str, int]]:
        """Of several orchestrators, by name: groups that each added to the log between the two newest plans, and its restarts."""
        groups = (self.rollout.groups if self.rollout else None) or ()
        names = [role_of(number) for number in range(len(groups))]
        return {
            name: {"groups": count, "restarts": self.restarts.get(name, 0)} for name, count in zip(names, groups, strict=True)
        }

    def rollout_wait(self, iteration: int) -> float | None:
        """Idle time of the replicas before a recent iteration (see orchestrator/replicas/idle_time.py), as a share of the time
        since the plan before, in which it was measured; None when either is unknown."""
        return self._waits.get(iteration)

    def rl_seconds(self) -> float:
        """Wall time of all iterations in seconds. The first iteration starts when the evaluation before it ends."""
        return self._seconds

    def time_split(self) -> dict[str, float]:
        """Seconds of all iterations by activity of the learner. They sum to `rl_seconds()`."""
        return {**self._split, "other": max(0.0, self._seconds - sum(self._split.values()))}

    def staleness(self) -> list[int]:
        """Number of trained samples with staleness 0, 1, ... over all iterations."""
        return list(self._staleness)

    def remaining_seconds(self, iterations: int) -> float | None:
        """Estimated seconds for the remaining iterations, from the mean of the newest ones; None before the first."""
        newest = [float(record.metrics["time/iteration"]) for record in self.recent][-20:]
        trained = self.newest if self.replayed is None else self.replayed
        return max(0, iterations - trained) * sum(newest) / len(newest) if newest else None

    def sft_remaining_seconds(self) -> float | None:
        """Estimated seconds for the remaining steps of the warm start's phase; None before its second record."""
        if self.sft is None or self._sft_first is None or self.sft.step <= self._sft_first.step:
            return None
        pace = (self.sft.time - self._sft_first.time) / (self.sft.step - self._sft_first.step)
        return (self.sft.steps - self.sft.step) * pace

    def reward_parts(self) -> dict[str, float]:
        """Mean unweighted value of each reward and sub-part in the newest iteration."""
        metrics = self.last.metrics if self.last else {}
        names = (name for name in metrics if name.startswith("reward/") and name not in ("reward/mean", "reward/std"))
        return {name.removeprefix("reward/"): float(metrics[name]) for name in names}

    def not_learned(self) -> list[str]:
        """That the run has learned nothing, and what may be the cause; see `Learning.findings`."""
        return self.learning.findings(self.evaluations, self.evaluation)

    def summary(self) -> Line:
        """The values of summary.json."""
        seconds, split = self._seconds, self.time_split()
        return {
            f"{self.metric}_before": self.score(first=True),
            f"{self.metric}_after": self.score_after(),
            "sft_seconds": round(self.sft_seconds, 2),
            "rl_seconds": round(seconds, 2),
            "iterations": self.iterations,
            "iteration": self.newest,
            "replayed": self.replayed,
            "reward": self.last.metrics["reward/mean"] if self.last else None,
            "versions": dict(self.versions),
            "orchestrators": self.orchestrators(),
            "waiting": self.waiting,
            "updated": self.time,
            "samples_per_second": round(self.iterations * self.samples_per_iteration / seconds, 2) if seconds else None,
            "time_split": {name: round(value, 2) for name, value in split.items()},
            "rollout_wait_seconds": round(self._wait_seconds, 2),
            "staleness": self.staleness(),
            "mismatch_kl_max": self._mismatch,
            "evaluations": {str(version): value for version, value in sorted(self.evaluations.items())},
            "newest_evaluation": self.evaluation and {"version": self.evaluation.version, **self.evaluation.metrics},
            "failed_evaluations": {str(version): text for version, text in sorted(self.failed_evaluations.items())},
            "checkpoint": self.saved and self.saved.path,
            "hf_path": self.saved and self.saved.hf_path,
            "not_learned": self.not_learned(),
            "alarms": [text for _, text in self.alarms],
            "tracker_failures": dict(self.tracker_failures),
            "starts": self.starts,
            "forked_from": self.forked_from,
        }

    def stage_summary(self) -> Line:
        """The values of a stage's summary.json."""
        return {
            "step": self.newest,
            "steps": self.steps,
            "replayed": self.replayed,
            "loss": self.loss,
            "step_seconds": self._seconds,
            "eval_before": _measured(self.held_out[0]) if self.held_out else None,
            "eval_after": _measured(self.held_out[-1]) if self.held_out else None,
            "hf_path": self.hf_path,
            "updated": self.time or None,
        }

    def _start(self, record: Started) -> None:
        """Resets the state of the processes, since those of the previous start have ended."""
        self.starts, self.started = record.start, record.time
        self.forked_from, self.replayed = record.forked_from or self.forked_from, None
        self.sft, self._sft_first, self.evaluating, self.loading, self.engine_start = None, None, None, {}, None
        self._planned, self.waiting = None, ""
        self.versions, self.replicas, self.restarts, self.tracker_failures = {}, {}, {}, {}

    def _iterate(self, record: IterationTrained) -> None:
        metrics = record.metrics
        self.iterations += 1
        self.newest, self.replayed = record.iteration, None
        self.loading = {role: load for role, load in self.loading.items() if record.time - load.time < LOADING_SECONDS}
        seconds = float(metrics["time/iteration"])
        if not self.first:
            self.first = self.newest
            before = self.evaluation
            if before and before.version == self.newest - 1:
                seconds = min(seconds, record.time - before.time)
        excess = metrics["time/iteration"] - seconds
        self._seconds += seconds
        for name, key in SPLIT.items():
            self._split[name] += metrics.get(key, 0.0) - (excess if key == "time/learner_wait" else 0.0)
        counts = metrics.get("staleness/samples", ())
        self._staleness = [sum(pair) for pair in zip_longest(self._staleness, counts, fillvalue=0)]
        self._mismatch = max(self._mismatch or 0.0, metrics.get("mismatch_kl") or 0.0)
        self.recent.append(record)
        self.learning.add(metrics)

    def _wait(self, record: GroupsPlanned) -> None:
        seconds, before = record.metrics["time/rollout_wait"], self._planned
        self.rollout, self._planned = record, record.time
        if record.iteration > self._newest_wait:
            self._newest_wait = record.iteration
            self._wait_seconds += seconds
            if before is not None and record.time > before:
                self._waits[record.iteration] = min(1.0, seconds / (record.time - before))
                _keep_newest(self._waits)

    def _evaluate(self, record: Evaluation) -> None:
        name, value = evaluation_of(record)
        if self.evaluation is None or not comparable(record, self.evaluation):
            self.evaluations.clear()
            self.metric, self.evaluation = name, None
        self.evaluations[record.version] = value
        self.metric = max(name, self.metric)  # `score` rather than `accuracy`
        if self.evaluation is None or record.version >= self.evaluation.version:
            self.evaluation = record
        self.failed_evaluations.pop(record.version, None)


def _measured(record: StageEvaluation) -> Line:
    return {"step": record.step, "rows": record.rows, **record.metrics}


T = TypeVar("T")


def _keep_newest(by_number: dict[int, T]) -> None:
    while len(by_number) > RECENT:
        del by_number[min(by_number)]
