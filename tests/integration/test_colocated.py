"""A colocated run as processes, with simulated learner and replicas. Lease, turns, pushes, restarts and the log are real."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from polyreme.experience.device_lease import trains
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from support.processes import command_line
from support.simulated_run import SimulatedRun, simulated_run


@asynccontextmanager
async def device_events(run: Run) -> AsyncIterator[list[str]]:
    """Collects the lease's events during the block; they are complete at its end."""
    events: list[str] = []

    async def watch(last: str, block_ms: int) -> str:
        last, signals = await run.watch(last, block_ms)
        events.extend(value for kind, value in signals if kind == "device")
        return last

    async def follow() -> None:
        last = "0"
        while not over.is_set() or last != await run.last_event():
            last = await watch(last, 100)

    over = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        try:
            yield events
        finally:
            over.set()


def exclusive_grants(events: list[str]) -> int:
    """Checks that `train` was never granted together with another grant, and counts its grants."""
    holders, trainings = set[str](), 0
    for text in events:
        what, _, holder = text.rpartition(" ")
        if what == "granted to":
            holders.add(holder)
            trainings += holder.startswith("train:")
            assert len(holders) == 1 or not any(name.startswith("train:") for name in holders), events
        elif what != "claimed by":
            holders.discard(holder)
    return trainings


def sampled_between(counts: Path, began: float, ended: float) -> int:
    """Tokens that replicas sampled between two Unix times, by their own counts."""
    lines = [line.split() for line in counts.read_text().splitlines()]
    tokens = [int(count) for at, count in lines if began <= float(at) <= ended]
    return sum(max(0, after - before) for before, after in pairwise(tokens))  # a replica that starts counts from 0


async def test_learner_and_replica_take_turns_although_each_is_killed_in_its_own(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"placement": "colocated", "iterations": 4, "trainer": {"save_interval": 1}}
    slow = ("--step-seconds", "0.01", "--count", str(tmp_path / "counts"))
    async with (
        simulated_run(redis_url, run_id, tmp_path, replicas=slow, train_seconds=1.0, **options) as started,
        device_events(started.run) as events,
    ):
        log = ExperienceLog(started.run)

        async def trains_before_the_last() -> bool | None:
            return (await log.planned() in (2, 3) and await trains(started.run)) or None

        async def samples_before_the_last() -> bool | None:
            return (await log.version() in (2, 3) and not await trains(started.run)) or None

        assert await started.run.until(trains_before_the_last, within=300), started.logs()
        learner(started).kill()
        assert await started.run.until(samples_before_the_last, within=300), started.logs()
        started.children["rollout-0"].kill()
        await started.children["rollout-0"].wait()
        started.start("rollout-0")
        assert await started.ended(300) == ("done", ""), started.logs()
        assert (await log.audit()).clean
        records = await started.records("iteration")
        assert sorted({record["iteration"] for record in records}) == [1, 2, 3, 4]
        assert all(record["time/device_wait"] >= 0 and record["staleness/max"] == 0 for record in records)
        for record in records:
            assert sampled_between(tmp_path / "counts", *map(float, record["devices_used"].split())) == 0, record["iteration"]
    assert exclusive_grants(events) >= 6  # two starts and four iterations


def learner(started: SimulatedRun) -> psutil.Process:
    processes = psutil.Process(started.children["train"].pid).children(recursive=True)
    [found] = [process for process in processes if "polyreme_trainer.testing.simulated_learner" in command_line(process)]
    return found


async def test_long_responses_pause_and_continue_in_the_next_turn(redis_url: str, run_id: str, tmp_path: Path) -> None:
    budget: dict[str, Any] = {"rollout": {"tokens_per_iteration": 24, "max_new_tokens": 48}, "max_staleness": 1}
    async with (
        simulated_run(redis_url, run_id, tmp_path, train_seconds=0.2, placement="colocated", iterations=4, **budget) as started,
        device_events(started.run) as events,
    ):
        assert await started.ended(200) == ("done", ""), started.logs()
        assert (await ExperienceLog(started.run).audit()).clean
        records = await started.records("iteration")
        assert sum(record["partial/carried_samples"] for record in records) > 0
        assert max(record["staleness/max"] for record in records) == 1
        assert max(record["partial/parts_max"] for record in records) == 2
    assert exclusive_grants(events) >= 5
