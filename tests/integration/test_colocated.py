"""A colocated run as processes, with simulated learner and replicas: lease, turns, pushes, restarts and the log are the real ones."""

from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from polyreme.experience.device_lease import trains
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from support.processes import command_line
from support.simulated_run import SimulatedRun, simulated_run


async def exclusive_grants(run: Run) -> int:
    """Replays the lease's events, checks that `train` was never granted beside anything else, and counts its grants."""
    holders, trainings = set[str](), 0
    _, events = await run.watch("0", 0)
    for text in [value for kind, value in events if kind == "device"]:
        what, _, holder = text.rpartition(" ")
        if what == "granted to":
            holders.add(holder)
            trainings += holder.startswith("train:")
            assert len(holders) == 1 or not any(name.startswith("train:") for name in holders), events
        elif what != "claimed by":
            holders.discard(holder)
    return trainings


async def test_learner_and_replica_take_turns_although_each_is_killed_in_its_own(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"placement": "colocated", "iterations": 4, "trainer": {"save_interval": 1}}
    slow = ("--step-seconds", "0.01")
    async with simulated_run(redis_url, run_id, tmp_path, replicas=slow, train_seconds=1.0, **options) as started:
        log = ExperienceLog(started.run)

        async def trains_the_second() -> bool | None:
            return (await log.planned() >= 2 and await trains(started.run)) or None

        async def samples_for_the_third() -> bool | None:
            return (await log.version() >= 2 and not await trains(started.run)) or None

        assert await started.run.until(trains_the_second, within=120), started.logs()
        learner(started).kill()
        assert await started.run.until(samples_for_the_third, within=120), started.logs()
        started.children["rollout-0"].kill()
        await started.children["rollout-0"].wait()
        started.start("rollout-0")
        assert await started.ended(200) == ("done", ""), started.logs()
        assert (await log.audit()).clean
        records = await started.records("iteration")
        assert sorted({record["iteration"] for record in records}) == [1, 2, 3, 4]
        assert all(record["time/device_wait"] >= 0 and record["staleness/max"] == 0 for record in records)
        assert await exclusive_grants(started.run) >= 6  # two starts and four iterations


def learner(started: SimulatedRun) -> psutil.Process:
    processes = psutil.Process(started.children["train"].pid).children(recursive=True)
    [found] = [process for process in processes if "polyreme_trainer.testing.simulated_learner" in command_line(process)]
    return found
