"""A run's progress, folded from its metric records. The live view, the summary and the exporter read it.

Invariant: pure (records in, in the order of the metrics stream; no clock, no I/O), and of a bounded size however long the run is: it
keeps sums and the newest records. An iteration counts once: a resumed learner repeats iterations from the log, and of those the first
record is the true one (a repetition waits for nothing, so its rates mean nothing).
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

Record = dict[str, Any]

SPLIT = {"waiting for samples": "time/learner_wait", "training": "time/train", "writing weights": "time/write"}
"""Where an iteration's wall time goes, by the record key that measures it; what these leave is overhead."""
RECENT = 64
"""Newest iterations whose records are kept."""
NOTICE_SECONDS = 300.0
"""How long a notice or an alarm is worth showing."""


def stream_time(stream_id: str) -> float:
    """Unix seconds at which Redis received an entry: the first half of its id is milliseconds."""
    return int(stream_id.partition("-")[0]) / 1000


def evaluation_of(record: Record) -> tuple[str, float]:
    """The name and value of an `eval` record's result: `accuracy` where every answer is right or wrong, else the mean `score`."""
    name = "accuracy" if "accuracy" in record else "score"
    return name, float(record[name])


@dataclass
class Progress:
    """What is known of a run. All times are Unix seconds, all durations seconds.

    Attributes:
        recent: the records of the newest iterations, oldest first.
        first, newest: number of the first iteration (a fork's is not 1) and of the newest; 0 before one.
        iterations: how many there are.
        evaluations: result by version. `metric` names it, `evaluation` is the newest one's record.
        failed_evaluations: why a version has no evaluation; the newest ones.
        versions: served version by replica; `replicas` has the URL of each replica's /v1 and only those that are there.
        starts: how often the run was started; `started` is the time of the newest start.
        restarts: by process, since the newest start.
        tracker_failures: by tracker, since the newest start.
    """

    samples_per_iteration: int
    time: float = 0.0
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT))
    first: int = 0
    newest: int = 0
    iterations: int = 0
    evaluations: dict[int, float] = field(default_factory=dict)
    metric: str = "accuracy"
    evaluation: Record | None = None
    failed_evaluations: dict[int, str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    starts: int = 0
    started: float | None = None
    forked_from: Record | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    alarms: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=5))
    alarm_count: int = 0
    notices: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=5))
    tracker_failures: dict[str, int] = field(default_factory=dict)
    gates: dict[str, Record] = field(default_factory=dict)
    sft: Record | None = None
    sft_seconds: float = 0.0
    saved: Record | None = None
    rollout: Record | None = None
    learned: bool = False
    _seconds: float = 0.0
    _split: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SPLIT, 0.0))
    _waits: dict[int, float] = field(default_factory=dict)
    _wait_seconds: float = 0.0
    _staleness: list[int] = field(default_factory=list)
    _mismatch: float | None = None

    def repeats(self, record: Record) -> bool:
        """Whether the record is of an iteration that is there already."""
        return record.get("kind") == "iteration" and record["iteration"] <= self.newest

    def add(self, record: Record) -> None:
        """Adds the next record. It has a `time`; unknown kinds and repeated iterations change nothing."""
        match record.get("kind"):
            case "start":
                self._start(record)
            case "iteration" if not self.repeats(record):
                self._iterate(record)
            case "rollout":
                self._wait(record)
            case "eval":
                self._evaluate(record)
            case "eval_failed":
                self.failed_evaluations[record["version"]] = record["text"]
                _keep_newest(self.failed_evaluations)
            case "commit":
                self.versions[record["replica"]] = record["version"]
            case "replicas":
                self.replicas = dict(record["replicas"])
                self.versions = {name: version for name, version in self.versions.items() if name in self.replicas}
            case "restart":
                self.restarts[record["process"]] = self.restarts.get(record["process"], 0) + 1
            case "sft":
                self.sft = record
            case "sft_done":
                self.sft, self.sft_seconds = None, record["seconds"]
            case "saved":
                self.saved = record
            case "alarm":
                self.alarms.append((record["time"], record["text"]))
                self.alarm_count += 1
            case "notice":
                self.notices.append((record["time"], f"{record['service']}: {record['text']}"))
            case "tracker_failed":
                self.tracker_failures[record["tracker"]] = record["failures"]
            case "gate":
                self.gates[record["name"]] = record
            case "done_learning":
                self.learned = True
            case _:
                return
        self.time = max(self.time, record["time"])

    @property
    def last(self) -> Record | None:
        """The newest iteration's record."""
        return self.recent[-1] if self.recent else None

    def score(self, first: bool = False) -> float | None:
        """Result of the newest (or the first) evaluation; `metric` names it."""
        return self.evaluations[(min if first else max)(self.evaluations)] if self.evaluations else None

    def score_after(self) -> float | None:
        """Result of the trained version. None when it was not evaluated: an older version's result says nothing about it."""
        return self.evaluations.get(self.newest) if self.iterations else None

    def rollout_wait(self, iteration: int) -> float | None:
        """Seconds in which replicas were idle before a recent iteration; see orchestrator/idle_time.py."""
        return self._waits.get(iteration)

    def rl_seconds(self) -> float:
        """Wall time of all iterations. The first begins when the evaluation before it has ended."""
        return self._seconds

    def time_split(self) -> dict[str, float]:
        """Seconds of the iterations by what the learner did; they sum to `rl_seconds()`."""
        return {**self._split, "other": max(0.0, self._seconds - sum(self._split.values()))}

    def staleness(self) -> list[int]:
        """Trained samples of staleness 0, 1, ... over all iterations."""
        return list(self._staleness)

    def remaining_seconds(self, iterations: int) -> float | None:
        """Estimate for the iterations that are missing, by the mean of the newest; None before the first."""
        newest = [float(record["time/iteration"]) for record in self.recent][-20:]
        return max(0, iterations - self.newest) * sum(newest) / len(newest) if newest else None

    def reward_parts(self) -> dict[str, float]:
        """Mean raw value of each reward and sub-part in the newest iteration."""
        record = self.last or {}
        names = (name for name in record if name.startswith("reward/") and name not in ("reward/mean", "reward/std"))
        return {name.removeprefix("reward/"): float(record[name]) for name in names}

    def summary(self) -> Record:
        """The numbers of summary.json."""
        seconds, split = self._seconds, self.time_split()
        return {
            f"{self.metric}_before": self.score(first=True),
            f"{self.metric}_after": self.score_after(),
            "sft_seconds": round(self.sft_seconds, 2),
            "rl_seconds": round(seconds, 2),
            "iterations": self.iterations,
            "samples_per_second": round(self.iterations * self.samples_per_iteration / seconds, 2) if seconds else None,
            "time_split": {name: round(value, 2) for name, value in split.items()},
            "rollout_wait_seconds": round(self._wait_seconds, 2),
            "staleness": self.staleness(),
            "mismatch_kl_max": self._mismatch,
            "evaluations": {str(version): value for version, value in sorted(self.evaluations.items())},
            "failed_evaluations": {str(version): text for version, text in sorted(self.failed_evaluations.items())},
            "checkpoint": self.saved and self.saved["path"],
            "hf_path": self.saved and self.saved["hf_path"],
            "alarms": [text for _, text in self.alarms],
            "tracker_failures": dict(self.tracker_failures),
            "starts": self.starts,
            "forked_from": self.forked_from,
        }

    def _start(self, record: Record) -> None:
        """Processes of the start before are gone."""
        self.starts, self.started = record["start"], record["time"]
        self.forked_from = record.get("forked_from") or self.forked_from
        self.sft, self.learned = None, False
        self.versions, self.replicas, self.restarts, self.tracker_failures = {}, {}, {}, {}

    def _iterate(self, record: Record) -> None:
        self.iterations += 1
        self.newest = record["iteration"]
        seconds = float(record["time/iteration"])
        if not self.first:
            self.first = self.newest
            before = self.evaluation
            if before and before["version"] == self.newest - 1:
                seconds = min(seconds, float(record["time"] - before["time"]))
        excess = record["time/iteration"] - seconds
        self._seconds += seconds
        for name, key in SPLIT.items():
            self._split[name] += record.get(key, 0.0) - (excess if key == "time/learner_wait" else 0.0)
        counts = record.get("staleness/samples", ())
        self._staleness = [sum(pair) for pair in zip_longest(self._staleness, counts, fillvalue=0)]
        self._mismatch = max(self._mismatch or 0.0, record.get("mismatch_kl") or 0.0)
        self.recent.append(record)

    def _wait(self, record: Record) -> None:
        self.rollout = record
        if record["iteration"] not in self._waits:
            self._waits[record["iteration"]] = record["time/rollout_wait"]
            self._wait_seconds += record["time/rollout_wait"]
            _keep_newest(self._waits)

    def _evaluate(self, record: Record) -> None:
        name, value = evaluation_of(record)
        self.evaluations[record["version"]] = value
        self.metric = "score" if "score" in (name, self.metric) else name
        if self.evaluation is None or record["version"] >= self.evaluation["version"]:
            self.evaluation = record
        self.failed_evaluations.pop(record["version"], None)


def _keep_newest(by_number: dict[int, Any]) -> None:
    while len(by_number) > RECENT:
        del by_number[min(by_number)]
