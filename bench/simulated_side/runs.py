"""One measured run with simulated replicas and learner, and all other processes real.

Invariant: rates are between two iteration records in mid-run, and CPU seconds are from the same interval, so neither start-up nor the end
of the run counts.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from support.simulated_run import SimulatedRun

COUNT = "tokens.txt"
"""The file in a run's folder in which its replicas count tokens (`--count`)."""
LIMIT = 120.0  # timeout in seconds from one iteration to the next, including start-up


@dataclass
class Stretch:
    """The measured iterations of a run.

    Attributes:
        records: their records, preceded by the record of the iteration before them.
        tokens: number of tokens that all replicas sampled, and the seconds of sampling.
        cpu_seconds: CPU seconds by process.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    tokens: tuple[int, float] = (0, 0.0)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return float(self.records[-1]["time"] - self.records[0]["time"])

    def total(self, key: str) -> float:
        """Returns the sum of a record's number over the measured iterations."""
        return float(sum(record[key] for record in self.records[1:]))

    def mean(self, key: str) -> float:
        return self.total(key) / (len(self.records) - 1)


async def measured(started: SimulatedRun, redis_pid: int, warm_up: int, seconds: float) -> Stretch:
    """Follows a run through `warm_up` iterations and `seconds` more, to the end of an iteration.

    Raises:
        RuntimeError: the run ended or stalled; shows the logs.
    """
    stretch, before = Stretch(), dict[str, float]()
    async for record in _iterations(started):
        if record["iteration"] < warm_up:
            continue
        if not stretch.records:
            before = cpu_seconds(started, redis_pid)
        stretch.records.append(record)
        if stretch.seconds >= seconds:
            break
    after = cpu_seconds(started, redis_pid)
    stretch.cpu_seconds = {name: after[name] - before[name] for name in before}
    stretch.tokens = _sampled(started.folder / COUNT, stretch.records[0]["time"], stretch.records[-1]["time"])
    return stretch


def _sampled(path: Path, start: float, end: float) -> tuple[int, float]:
    """Returns the tokens between the first line after `start` and the last before `end`, and the seconds between these lines."""
    lines = [line.split() for line in path.read_text().splitlines()]
    (first, before), *_, (last, after) = [(float(at), int(tokens)) for at, tokens in lines if start <= float(at) <= end]
    return after - before, last - first


async def _iterations(started: SimulatedRun) -> AsyncIterator[dict[str, Any]]:
    last, deadline = "0", time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        for at, record in await started.run.records(last, 1000):
            last = at
            if record["kind"] == "iteration":
                deadline = time.monotonic() + LIMIT
                yield record
        if started.children["train"].poll() is not None:
            break
    raise RuntimeError(f"the run ended or stalled: {await started.run.state()}\n{started.logs()}")


def orchestrators_of(started: SimulatedRun) -> list[psutil.Process]:
    """The orchestrators' processes, the leading one first."""
    found = [(child.cmdline(), child) for child in psutil.Process(started.children["train"].pid).children()]
    return [child for words, child in sorted(found, key=lambda each: each[0][-1:]) if "polyreme_trainer.orchestrator" in words]


def cpu_seconds(started: SimulatedRun, redis_pid: int) -> dict[str, float]:
    """Returns the CPU seconds of each process so far."""
    children = {name: child.pid for name, child in started.children.items()}
    pids = {"redis": [redis_pid], "replicas": [pid for name, pid in children.items() if name.startswith("rollout")]}
    for name in children.keys() & {"reward", "environment"}:
        pids[name] = [children[name], *(child.pid for child in psutil.Process(children[name]).children(recursive=True))]
    pids["supervisor"] = [children["train"]]
    orchestrators = orchestrators_of(started)
    pids["orchestrator"] = [process.pid for process in orchestrators]
    pids["learner"] = [each.pid for each in psutil.Process(children["train"]).children() if each not in orchestrators]
    pids["bench"] = [psutil.Process().pid]
    return {name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in group) for name, group in pids.items()}
