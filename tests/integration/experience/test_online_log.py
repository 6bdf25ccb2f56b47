"""Sessions of a product in the log: their scripts change nothing twice, and their groups keep the bound of staleness in any order."""

import random

import pytest

from polyreme.errors import StaleTermError
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.online import OnlineSessions
from polyreme.experience.run import Run
from support.simulated import ROWS, config_tree, make_run

SIZE = 3


@pytest.fixture(params=[0, 1, 3])
async def run(request, redis, run_id, tmp_path) -> Run:
    settings = {"groups_per_iteration": SIZE, "max_staleness": request.param, "iterations": 40}
    return await make_run(redis, run_id, config_tree(tmp_path, ROWS, **settings))


async def test_every_group_is_planned_in_time(run):
    staleness = (await run.config()).max_staleness
    rng, orchestrator, learner, store = random.Random(staleness), ExperienceLog(run), ExperienceLog(run), OnlineSessions(run)
    await orchestrator.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    planned = version = appended = full = 0
    for number in range(100):
        id, oldest = f"{number:016x}", max(0, version - rng.randint(0, staleness + 1))
        assert await store.open(id, "", 10**6)
        assert [await store.add_turn(id, 0, b"turn", oldest) for _ in range(2)] == ["ok", "ok"]
        assert [await store.reward(id, 0.5, "", grouped=False) for _ in range(2)] == ["ok", "ok"]
        index = await orchestrator.next_index()
        done = await store.append(orchestrator, index, [id], b"group", oldest, 0.5)
        if done is None:
            full += 1
            assert await store.drop(orchestrator, id, "stale") and not await store.drop(orchestrator, id, "stale")
        else:
            assert done and not await store.append(orchestrator, index, [id], b"group", oldest, 0.5)
            appended += 1
        if rng.random() < 0.5 and appended >= SIZE * (planned + 1) and planned <= version:
            plan = await learner.plan(planned + 1, 600.0)
            assert plan is not None, "an iteration with enough groups waits for nothing"
            planned += 1
            rows = await run.redis.hmget(run.key("ledger"), list(plan.indices))
            assert all(planned - 1 - int(row.split()[2]) <= staleness for row in rows)
        if rng.random() < 0.3 and version < planned:
            version += 1
            await learner.set_version(version)
    assert planned > 3 and full > 3 and (await orchestrator.audit()).clean
    counts = await store.counts()
    assert (counts["opened"], counts["rewarded"]) == (100, 100)
    assert (counts["trained"], counts["dropped stale"], counts["complete"]) == (appended, full, 0)


async def test_what_a_session_cannot_become(run):
    store, log = OnlineSessions(run), ExperienceLog(run)
    assert await store.open("a", "sum", 1) and await store.open("a", "sum", 1) and not await store.open("b", "sum", 1)
    assert await store.reward("a", 1.0, "", grouped=True) == "empty"
    assert [await store.add_turn("a", number, b"x", 0) for number in (1, 0)] == ["conflict", "ok"]
    assert await store.add_turn("a", 0, b"other", 0) == "conflict"
    assert await store.reward("a", 1.0, "product", grouped=True) == "task"
    assert [await store.reward("a", reward, "sum", grouped=True) for reward in (1.0, 1.0, 2.0)] == ["ok", "ok", "other"]
    assert await store.add_turn("a", 1, b"x", 0) == "rewarded" and await store.add_turn("c", 0, b"x", 0) == "unknown"
    with pytest.raises(StaleTermError):
        await store.drop(log, "a", "stale")
    await log.take(Writer.ORCHESTRATOR)
    replaced = ExperienceLog(run, log.term)
    await log.take(Writer.ORCHESTRATOR)
    with pytest.raises(StaleTermError):
        await store.append(replaced, 0, ["a"], b"group", 0, 1.0)
    assert (await store.read("a")).turns == (b"x",)
