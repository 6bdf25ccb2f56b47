"""Which failures of an evaluation are this version's alone: a real run and log; a stand-in for the replicas and rewards behind it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.errors import UnavailableError
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme_trainer.orchestrator.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.schedule import EvalSchedule
from polyreme_trainer.orchestrator.tasks import task_group
from support.simulated import ROWS, config_tree, make_run


class Answers:
    """An evaluator: version 0 is evaluated at once, the others as `later` does."""

    def __init__(self, later: Callable[[], Awaitable[None]], first: bool) -> None:
        self.later, self.first = later, first

    async def evaluate(self, version: int) -> None:
        if version or self.first:
            await self.later()


@pytest.fixture
def evaluated(redis: Redis, run_id: str, tmp_path: Path):
    """`await evaluated(...)`: evaluates versions 0 and 2, the second while training goes on; returns what is told of failures."""

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
async def test_servers_that_are_gone_are_not_told_as_a_slow_evaluation(evaluated, first: bool) -> None:
    """Neither where an evaluation may take as long as it likes nor where it has a deadline."""

    async def unscored() -> None:
        raise UnavailableError("a reward server that answers", "none", "Start one.")

    with pytest.raises(UnavailableError, match="a reward server that answers"):
        await evaluated(unscored, first)


async def test_an_evaluation_beyond_its_deadline_is_given_up(evaluated) -> None:
    failed = await evaluated(asyncio.Event().wait)
    assert failed == ["the evaluation of version 2 took longer than eval_hold = 0.05 s"]
