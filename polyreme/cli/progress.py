"""A run as its metric records tell it: one fold, from which the live view and the summary are both read.

Pure: records in, in the order of the metrics stream; no clock and no I/O. Replayed iterations (after a resume) replace the ones
they repeat, so a record seen twice counts once.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

Record = dict[str, Any]

SPLIT = {"waiting for samples": "time/learner_wait", "training": "time/train", "writing weights": "time/write"}
"""Where an iteration's wall time goes, by the record key that measures it; what these leave is overhead."""


def stream_time(stream_id: str) -> float:
    """Unix seconds at which Redis took an entry in: the first half of its id is milliseconds."""
    return int(stream_id.partition("-")[0]) / 1000


@dataclass
class Progress:
    """What is known of a run. `times` in it are Unix seconds."""

    samples_per_iteration: int
    iterations: dict[int, Record] = field(default_factory=dict)
    evaluations: dict[int, Record] = field(default_factory=dict)
    rollout_waits: dict[int, float] = field(default_factory=dict)
    """Seconds in which replicas had nothing to do, by iteration (see orchestrator/idle.py)."""
    failed_evaluations: dict[int, str] = field(default_factory=dict)
    """Why a version has no evaluation."""
    replicas: dict[str, int] = field(default_factory=dict)
    alarms: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    gates: dict[str, Record] = field(default_factory=dict)
    sft: Record | None = None
    sft_seconds: float = 0.0
    saved: Record | None = None
    learned: bool = False

    def add(self, record: Record) -> None:
        """Takes in the next record. It has a `time`; kinds that are not known here change nothing."""
        match record.get("kind"):
            case "iteration":
                self.iterations[record["iteration"]] = record
            case "rollout":
                self.rollout_waits[record["iteration"]] = record["time/rollout_wait"]
            case "eval":
                self.evaluations[record["version"]] = record
                self.failed_evaluations.pop(record["version"], None)
            case "eval_failed":
                self.failed_evaluations[record["version"]] = record["text"]
            case "commit":
                self.replicas[record["replica"]] = record["version"]
            case "sft":
                self.sft = record
            case "sft_done":
                self.sft, self.sft_seconds = None, record["seconds"]
            case "saved":
                self.saved = record
            case "alarm":
                self.alarms.append(record["text"])
            case "notice":
                self.notices.append(f"{record['service']}: {record['text']}")
            case "gate":
                self.gates[record["name"]] = record
            case "done_learning":
                self.learned = True

    @property
    def last(self) -> Record | None:
        """The newest iteration."""
        return self.iterations[max(self.iterations)] if self.iterations else None

    def accuracy(self, first: bool = False) -> float | None:
        """Mean score of the newest (or the first) evaluation."""
        if not self.evaluations:
            return None
        version = (min if first else max)(self.evaluations)
        return float(self.evaluations[version]["accuracy"])

    def accuracy_after(self) -> float | None:
        """Mean score of the trained version; None when nobody evaluated it: an older version's says nothing of it."""
        trained = self.evaluations.get(max(self.iterations)) if self.iterations else None
        return float(trained["accuracy"]) if trained else None

    def rl_seconds(self) -> float:
        """Wall time of all iterations. The first begins when the evaluation before it has ended."""
        seconds = sum(self._seconds(number) for number in self.iterations)
        return float(seconds)

    def time_split(self) -> dict[str, float]:
        """Seconds of the iterations by what the learner did; they sum to `rl_seconds()`."""
        split = {name: 0.0 for name in SPLIT}
        for number, record in self.iterations.items():
            excess = record["time/iteration"] - self._seconds(number)
            for name, key in SPLIT.items():
                split[name] += record.get(key, 0.0) - (excess if key == "time/learner_wait" else 0.0)
        split["other"] = max(0.0, self.rl_seconds() - sum(split.values()))
        return split

    def staleness(self) -> list[int]:
        """Trained samples of staleness 0, 1, ... over all iterations."""
        histograms = [record.get("staleness/samples", ()) for record in self.iterations.values()]
        return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]

    def summary(self) -> Record:
        """The numbers of summary.json."""
        seconds = self.rl_seconds()
        return {
            "accuracy_before": self.accuracy(first=True),
            "accuracy_after": self.accuracy_after(),
            "sft_seconds": round(self.sft_seconds, 2),
            "rl_seconds": round(seconds, 2),
            "iterations": len(self.iterations),
            "samples_per_second": round(len(self.iterations) * self.samples_per_iteration / seconds, 2) if seconds else None,
            "time_split": {name: round(value, 2) for name, value in self.time_split().items()},
            "rollout_wait_seconds": round(sum(self.rollout_waits.values()), 2),
            "staleness": self.staleness(),
            "mismatch_kl_max": max((record.get("mismatch_kl") or 0.0 for record in self.iterations.values()), default=None),
            "evaluations": {str(version): record["accuracy"] for version, record in sorted(self.evaluations.items())},
            "failed_evaluations": {str(version): text for version, text in sorted(self.failed_evaluations.items())},
            "checkpoint": self.saved and self.saved["path"],
            "hf_path": self.saved and self.saved["hf_path"],
            "alarms": list(self.alarms),
        }

    def _seconds(self, number: int) -> float:
        record = self.iterations[number]
        seconds = float(record["time/iteration"])
        evaluated = self.evaluations.get(number - 1) if number == min(self.iterations) else None
        if evaluated and evaluated["time"] < record["time"]:
            return min(seconds, float(record["time"] - evaluated["time"]))
        return seconds
