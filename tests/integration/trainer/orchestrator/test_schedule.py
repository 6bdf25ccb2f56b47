"""Failures that affect only one version's evaluation: a real run and log, with a stand-in for replicas and rewards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.errors import UnavailableError
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import RunState
from polyreme.process.tasks import task_group
from polyreme_trainer.orchestrator.evaluation.schedule import EvalSchedule
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from support.simulated import ROWS, config_tree, make_run


class Answers:
    """An evaluator: version 0 succeeds at once, the others behave like `later`."""

    def __init__(self, later: Callable[[], Awaitable[None]], first: bool) -> None:
        self.later, self.first = later, first

    async def evaluate(self, version: int) -> float:
        if version or self.first:
            await self.later()
        return 1.0


@pytest.fixture
def evaluated(redis: Redis, run_id: str, tmp_path: Path):
    """`await evaluated(...)`: evaluates versions 0 and 2, the second one during training. Returns the notices of failures."""

    async def evaluated(later: Callable[[], Awaitable[None]], first: bool = False) -> list[str]:
        sections = {"iterations": 8, "max_staleness": 1, "eval_interval": 2, "eval_hold": 0.05}
        config = config_tree(tmp_path, ROWS, data={"eval": str(tmp_path / "train.jsonl")}, **sections)
        run = await make_run(redis, run_id, config)
        log = ExperienceLog(run)
        await log.take(Writer.ORCHESTRATOR)
        schedule = EvalSchedule(run, config, log, ReplicaPool(run, log, 1.0, 1, None), Answers(later, first), lambda: None)  # type: ignore[arg-type]
        async with task_group() as group:
            for version in (0, 2):
                await schedule.start_next(version, group)
                assert schedule.task is not None
                await asyncio.wait({schedule.task})
        assert await log.evaluated() == 2
        return [record["text"] for _, record in await run.records("0", 0) if record["kind"] == "eval_failed"]

    return evaluated


@pytest.mark.parametrize("first", [True, False])
async def test_lost_servers_are_not_reported_as_a_slow_evaluation(evaluated, first: bool) -> None:
    """This holds with and without a deadline of the evaluation."""

    async def unscored() -> None:
        raise UnavailableError("a reward server that answers", "none", "Start one.")

    with pytest.raises(UnavailableError, match="a reward server that answers"):
        await evaluated(unscored, first)


async def test_an_evaluation_beyond_its_deadline_is_given_up(evaluated) -> None:
    failed = await evaluated(asyncio.Event().wait)
    assert failed == ["the evaluation of version 2 took longer than eval_hold = 0.05 s"]


class Results:
    """An evaluator with a given result of each version."""

    def __init__(self, **results: float) -> None:
        self.results = results

    async def evaluate(self, version: int) -> float:
        return self.results[f"v{version}"]


@pytest.mark.parametrize(
    ("results", "state"),
    [
        ({"v0": 0.5, "v2": 0.5, "v4": 0.4, "v6": 0.9}, "draining"),
        ({"v0": 0.5, "v2": 0.4, "v4": 0.6, "v6": 0.5}, "running"),
        ({"v0": 0.1, "v2": 0.5, "v4": 0.4, "v6": 0.3}, "draining"),
    ],
)
async def test_a_run_stops_after_two_results_that_are_no_new_best(
    redis: Redis, run_id: str, tmp_path: Path, results: dict[str, float], state: str
) -> None:
    sections = {"iterations": 8, "eval_interval": 2, "eval_stop_after": 2}
    config = config_tree(tmp_path, ROWS, data={"eval": str(tmp_path / "train.jsonl")}, **sections)
    run = await make_run(redis, run_id, config)
    await run.set_state(RunState.RUNNING)
    log = ExperienceLog(run)
    await log.take(Writer.ORCHESTRATOR)
    schedule = EvalSchedule(run, config, log, ReplicaPool(run, log, 1.0, 1, None), Results(**results), lambda: None)  # type: ignore[arg-type]
    async with task_group() as group:
        for version in (0, 2, 4, 6):
            await schedule.start_next(version, group)
            assert schedule.task is not None
            await asyncio.wait({schedule.task})
    found, reason = await run.state()
    assert found == state
    best = max(list(results.values())[:2])
    assert state == "running" or f"({best:.3f})" in reason
