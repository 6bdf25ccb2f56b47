"""The list of a Redis's runs for `polyreme status`."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.errors import UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.listing import list_run, list_runs, run_ids
from polyreme.experience.metric_records import Evaluation, VersionServed
from polyreme.experience.run import Run, RunState
from polyreme.rundir.run_status import redis_status
from support.configs import run_config


async def test_every_run_is_listed_once(redis: Redis, run: Run, run_id: str, tmp_path: Path) -> None:
    other, removed = await Run.create(redis, f"{run_id}*", run_config(tmp_path), {}), Run(redis, f"{run_id}-removed")
    await redis.hset(removed.key("meta"), "recorded", 1)  # by a process of a run that has been removed
    assert {run_id, other.run_id} <= set(await run_ids(redis))
    listed = {each.run_id: each for each in await list_runs(redis)}
    assert removed.run_id not in listed
    assert listed[run_id].state == RunState.STARTING and listed[run_id].iterations == 1000
    with pytest.raises(UnavailableError):
        await list_run(redis, "missing")


async def test_a_live_run_has_replicas_and_an_ended_one_a_reason(redis: Redis, run: Run) -> None:
    log = ExperienceLog(run)
    await log.take(Writer.LEARNER)
    await log.begin(0)
    async with await Registry(run).register(Lease("rollout", "a", "h:1", "h:2", 1)):
        await run.emit(VersionServed(replica="a", version=0))
        await run.emit(Evaluation(version=0, metrics={"accuracy": 0.25}))
        status = redis_status(await list_run(redis, run.run_id), "redis://h:6379")
        assert (status.state, status.iteration, status.replicas) == ("starting", 0, {"a": 0})
        assert (status.metric, status.value, status.reward) == ("accuracy", 0.25, None)
        assert status.updated is not None
        await run.set_state(RunState.FAILED, "no disk")
        ended = redis_status(await list_run(redis, run.run_id), "redis://h:6379")
    assert (ended.state, ended.reason, ended.replicas) == ("failed", "no disk", {})


async def test_a_state_of_a_newer_release_is_listed_and_refused(redis: Redis, run: Run) -> None:
    await redis.hset(run.key("meta"), "state", "resharding")
    status = redis_status(await list_run(redis, run.run_id), "redis://h:6379")
    assert (status.state, status.ended) == ("resharding", False)
    with pytest.raises(UnavailableError, match="'resharding'"):
        await run.state()
