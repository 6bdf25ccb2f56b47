"""Checks a long run for growth: memory of every process, files and Redis over 10,000 iterations.

    python bench/soak.py [--iterations 10000] [--minutes 60] [--every 5]

Replicas and learner are simulated and take no time, everything else is real: Redis with every write on disk, gRPC, and reward server,
supervisor, orchestrator, log and recorder in separate processes. The first fifth of the run is warm-up and does not count. A line is fitted
through the other measurements of each quantity; its growth is the line's increase from the first to the last of them.

growing              number of quantities that grow by more than LIMITS allow (0)
worst_growth         the largest growth of a process's resident memory, or of the data of Redis, as a share of its mean
repeated_lines       kinds of log lines, numbers masked, that are too frequent: warnings more than once in 100 iterations, others more
                     than once an iteration (0)
disk_per_iteration   bytes of the record (metrics and samples) of an iteration; the record grows by design
iterations           number of iterations; the run is stopped after --minutes
minutes_for_10000    minutes of 10,000 iterations at this pace, without start-up (60)

The data of Redis counts without its bounded streams, which are full after 4,000 iterations, and without the marks of changes, which
expire after ten minutes: a run here is shorter. Redis's resident memory, which has these and the space between them, does not count. The
reward server keeps its last 65,536 answers, so the bench fills that memory first. Redis's append-only file grows between two rewrites, so
only the part beyond the rewrite size counts; the bench lowers the minimum rewrite size, so that rewrites happen. The logs count as disk;
the run's record does not.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from polyreme.api.v1 import reward_pb2, reward_pb2_grpc
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run, RunState
from polyreme.net import rpc
from support.simulated_run import SimulatedRun, simulated_run

TARGET = {"growing": 0, "repeated_lines": 0, "minutes_for_10000": 60.0}
LIMITS = {"MiB": (4.0, 0.03), "files": (2.0, 0.0), "disk MiB": (4.0, 0.1)}
"""Allowed growth by unit: the larger of a number and a share of the mean."""
STALL = 300.0  # timeout in seconds without an iteration
SLACK = 10  # allowed lines in a short run
STREAMS = ("metrics", "commits", "events")
"""Redis's bounded streams."""
ANSWERS, BATCH = 1 << 16, 1024
"""Answers that the reward server remembers, and items in a call."""
REWRITE_MIB = 2
"""The append-only file is not rewritten below this size."""
_NUMBER = re.compile(r"[0-9a-f]{8,}|\d+(\.\d+)?")
MIB = 2.0**20

Series = dict[tuple[str, str], list[tuple[float, float]]]
"""(process, unit) -> (iteration, value) of each measurement."""


def processes(started: SimulatedRun) -> dict[str, psutil.Process]:
    """Returns the processes of the run by role."""
    found = {name: psutil.Process(child.pid) for name, child in started.children.items()}
    for child in found["train"].children():
        found["orchestrator" if any("orchestrator" in word for word in child.cmdline()) else "learner"] = child
    return found


def size(folder: Path, pattern: str) -> int:
    """Returns the bytes of all files in a folder, recursively."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


async def observe(started: SimulatedRun, server: EmbeddedServer, data_dir: Path, options: argparse.Namespace) -> Series:
    """Measures every `--every` seconds until the run ends, or for `--minutes`. Raises RuntimeError when the run stalls."""
    series: Series = defaultdict(list)
    reached, progress, last = 0, time.monotonic(), "0"
    until = time.monotonic() + 60 * options.minutes
    while started.children["train"].poll() is None and time.monotonic() < until:
        await asyncio.sleep(options.every)
        for at, record in await started.run.records(last, 0):
            last = at
            if record["kind"] == "iteration" and record["iteration"] > reached:
                reached, progress = record["iteration"], time.monotonic()
        if time.monotonic() - progress > STALL:
            raise RuntimeError(f"no iteration after {reached} for {STALL:.0f} s\n{started.logs()}")
        try:
            found = processes(started) | {"redis": psutil.Process(server.pid)}
            values = {name: (each.memory_info().rss / MIB, each.num_fds()) for name, each in found.items()}
        except psutil.NoSuchProcess:
            continue  # the run is ending
        if "learner" not in found or min(memory for memory, _ in values.values()) == 0:
            continue  # the same
        data, file = await redis_sizes(started, data_dir)
        for name, (memory, files) in values.items():
            if name != "redis":
                series[name, "MiB"].append((reached, memory))
            series[name, "files"].append((reached, files))
        series["redis data", "MiB"].append((reached, data))
        if file is not None:
            series["redis file", "disk MiB"].append((reached, file))
        series["logs", "disk MiB"].append((reached, size(started.folder, "*.log") / MIB))
        print(
            f"iteration {reached}: " + ", ".join(f"{name} {memory:.0f} MiB" for name, (memory, _) in values.items()), flush=True
        )
    return series


async def redis_sizes(started: SimulatedRun, data_dir: Path) -> tuple[float, float | None]:
    """MiB of Redis's data without streams and marks, and of its files beyond the rewrite size; None during a rewrite."""
    redis, key = started.run.redis, started.run.key
    info = await redis.info()
    streams = sum([await redis.memory_usage(key(name), samples=0) or 0 for name in STREAMS])
    marks = [mark async for mark in redis.scan_iter(match=key("once:*"), count=10_000)]
    tables = (await redis.memory_stats())["db.0"]
    per_mark = (await redis.memory_usage(marks[-1]) or 0) if marks else 0
    data = (info["used_memory"] - streams - len(marks) * per_mark - tables["overhead.hashtable.expires"]) / MIB
    if info["aof_rewrite_in_progress"]:
        return data, None
    rewritten_at = max(REWRITE_MIB * MIB, 2.0 * info["aof_base_size"])
    return data, max(0.0, size(data_dir, "*") - rewritten_at) / MIB


async def fill_answers(run: Run) -> None:
    """Has the reward server score as many items as it remembers."""

    async def registered() -> Lease | None:
        return next(iter(await Registry(run).leases("reward")), None)

    lease = await run.until(registered, STALL)
    if lease is None:
        raise RuntimeError(f"no reward server within {STALL:.0f} s")
    async with rpc.connect(lease.address, None) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        for first in range(0, ANSWERS, BATCH):
            items = [reward_pb2.ScoreItem(key=f"fill-{at}", response="1", label="1") for at in range(first, first + BATCH)]
            await stub.Score(reward_pb2.ScoreRequest(items=items), timeout=STALL)


def growth(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the increase of a fitted line over the last four fifths of the run, and the mean there."""
    last = points[-1][0]
    iterations, values = np.array([point for point in points if point[0] >= 0.2 * last]).T
    slope = np.polyfit(iterations, values, 1)[0] if len(set(iterations)) > 1 else 0.0
    return float(slope * (iterations[-1] - iterations[0])), float(values.mean())


def repeated(folder: Path, iterations: int) -> list[tuple[str, int]]:
    """Returns the kinds of log lines that are too frequent, with their counts."""
    kinds: Counter[str] = Counter()
    for path in folder.rglob("*.log"):
        with path.open(errors="replace") as lines:
            kinds.update(f"{path.name}: {_NUMBER.sub('#', line.strip())}" for line in lines)
    bounds = {kind: iterations + SLACK if " INFO " in kind else iterations / 100 + SLACK for kind in kinds}
    return [(kind, count) for kind, count in kinds.most_common() if count > bounds[kind]]


def report(series: Series, lines: list[tuple[str, int]], record: float) -> dict[str, float]:
    table = Table(title="growth over the last four fifths")
    for column in ("", "unit", "mean", "growth", "allowed"):
        table.add_column(column, justify="right" if column in ("mean", "growth", "allowed") else "left")
    growing, worst = 0, 0.0
    for (name, unit), points in sorted(series.items()):
        gained, mean = growth(points)
        least, share = LIMITS[unit]
        allowed = max(least, share * mean)
        growing += gained > allowed
        if unit == "MiB":
            worst = max(worst, gained / mean)
        table.add_row(name, unit, f"{mean:.1f}", f"{gained:+.2f}", f"{allowed:.1f}", style="red" if gained > allowed else "")
    Console(width=100).print(table)
    for kind, count in lines:
        print(f"{count} times: {kind}")
    return {
        "growing": growing,
        "worst_growth": round(worst, 4),
        "repeated_lines": len(lines),
        "disk_per_iteration": round(record, 1),
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    (folder / "run").mkdir()
    with EmbeddedServer.start(folder / "redis") as server:
        async with simulated_run(
            server.url,
            "bench-soak",
            folder,
            replicas=("--step-seconds", "0"),
            train_seconds=0.0,
            iterations=options.iterations,
            groups_per_iteration=1,
            group_size=2,
            max_staleness=1,
            executable=sys.executable,  # the processes themselves are measured, without a wrapper
            rollout={"max_new_tokens": 16},
            trainer={"save_interval": 100},
        ) as started:
            await fill_answers(started.run)
            await started.run.redis.config_set("auto-aof-rewrite-min-size", f"{REWRITE_MIB}mb")
            series = await observe(started, server, folder / "redis", options)
            if started.children["train"].poll() is None:
                await started.run.set_state(RunState.DRAINING, f"the bench ends after {options.minutes:g} minutes")
            state, reason = await started.ended(300.0)
            if state not in (RunState.DONE, RunState.STOPPED):
                raise RuntimeError(f"the run ended as {state}: {reason}\n{started.logs()}")
            iterations = await ExperienceLog(started.run).version()
            record = size(folder / "run", "*.jsonl") / iterations
            measured = report(series, repeated(folder, iterations), record)
            return {
                **measured,
                "iterations": iterations,
                "minutes_for_10000": round(minutes(await started.records("iteration")), 1),
            }


def minutes(records: list[dict[str, float]]) -> float:
    """Returns the minutes of 10,000 iterations at the pace of the newest records."""
    seconds = records[-1]["time"] - records[0]["time"]
    return 10_000 * seconds / (records[-1]["iteration"] - records[0]["iteration"]) / 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes after which the run is stopped")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two measurements")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(options, Path(folder)))
    met = all(measured[name] <= TARGET[name] for name in TARGET)
    print(json.dumps({"bench": "soak", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
