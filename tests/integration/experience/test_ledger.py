"""Details of the transition table. test_model.py tests the whole table."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from polyreme.errors import StaleTermError, StoreError
from polyreme.experience.ledger import (
    Admission,
    ExperienceLog,
    PartialRolloutPart,
    Plan,
    StaleAttemptError,
    TransitionError,
    Unplanned,
    Writer,
)
from polyreme.experience.run import Run, RunState
from polyreme.experience.shard import Shard
from support.configs import run_config, trainer

Pair = tuple[ExperienceLog, ExperienceLog]
Opener = Callable[..., Awaitable[Pair]]


@pytest.fixture
def opened(redis: Redis, run_id: str, tmp_path: Path) -> Opener:
    """Creates a run with the given limits and both roles taken, which has begun at version 0."""

    async def make(**limits: Any) -> Pair:
        config = run_config(tmp_path, **limits)
        run = await Run.create(redis, run_id, config, {})
        orchestrator, learner = ExperienceLog(run, shard=Shard(0, config.trainer.orchestrators)), ExperienceLog(run)
        await orchestrator.take(Writer.ORCHESTRATOR)
        await learner.take(Writer.LEARNER)
        await learner.begin(0)
        return orchestrator, learner

    return make


async def admit_all(log: ExperienceLog) -> list[Admission]:
    admissions = []
    while more := await log.admit():
        admissions += more
    return admissions


async def append(log: ExperienceLog, *admissions: Admission) -> None:
    for a in admissions:
        assert await log.append(a.index, a.attempt, b"payload %d" % a.index, a.version, 0.5)


async def test_nothing_is_admitted_before_the_learner_has_begun(run: Run) -> None:
    orchestrator, learner = ExperienceLog(run), ExperienceLog(run)
    await orchestrator.take(Writer.ORCHESTRATOR)
    assert await orchestrator.admit() == []
    assert await orchestrator.version() == -1
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    assert await orchestrator.admit() == [Admission(0, 1, 0)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_the_bound_holds_for_every_step(opened: Opener, staleness: int) -> None:
    orchestrator, learner = await opened(groups_per_iteration=2, max_staleness=staleness)
    admissions = await admit_all(orchestrator)
    assert len(admissions) == 2 * (1 + staleness)
    await append(orchestrator, *admissions)
    assert await orchestrator.admit() == []  # groups that are appended and not planned count too
    await learner.plan(1, 60)
    assert await orchestrator.admit() == []  # a plan alone frees no place
    await learner.set_version(1)
    assert [a.version for a in await admit_all(orchestrator)] == [1, 1]


async def test_nothing_is_admitted_for_iterations_beyond_the_last(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=2, max_staleness=2, iterations=2)
    admissions = await admit_all(orchestrator)
    assert len(admissions) == 4
    await append(orchestrator, *admissions)
    for iteration in (1, 2):
        assert await learner.plan(iteration, 60)
        await learner.set_version(iteration)
        assert await orchestrator.admit() == []


async def test_a_group_overtaken_by_newer_ones_is_still_trained_in_time(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=1, max_staleness=2)
    a, b, c = await admit_all(orchestrator)
    await append(orchestrator, a)
    assert await learner.plan(1, 60) == Plan(1, (a.index,))
    await learner.set_version(1)
    (d,) = await admit_all(orchestrator)
    await append(orchestrator, d)
    # b and c must be trained by iteration 3. If d were taken now, one of them would be too late.
    assert await learner.plan(2, 60) is None
    await append(orchestrator, c)
    assert await learner.plan(2, 60) == Plan(2, (c.index,))
    await learner.set_version(2)
    assert await learner.plan(3, 60) is None  # b is in flight, and this is its last chance
    await append(orchestrator, b)
    assert await learner.plan(3, 60) == Plan(3, (b.index,))


async def test_plans_take_the_oldest_tokens_first_then_the_order_of_prompts(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=6, max_staleness=1)
    admissions = await admit_all(orchestrator)
    assert len(admissions) == 12
    for a in reversed(admissions):
        await append(orchestrator, a)
    assert await learner.plan(1, 60) == Plan(1, (0, 1, 2, 3, 4, 5))
    assert await learner.plan(1, 60) == Plan(1, (0, 1, 2, 3, 4, 5))
    assert await learner.read(Plan(1, (3, 1))) == [b"payload 3", b"payload 1"]
    await learner.set_version(1)
    assert await learner.plan(2, 60) == Plan(2, (6, 7, 8, 9, 10, 11))


async def test_stragglers_expire_only_when_a_plan_waits_for_them(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=2, max_attempts=2)
    first, second = await admit_all(orchestrator)
    await append(orchestrator, first)
    assert await learner.plan(1, 60) is None
    assert await orchestrator.in_flight() == [second]
    await asyncio.sleep(0.02)
    assert await learner.plan(1, 0.01) is None
    assert await orchestrator.in_flight() == [Admission(1, 2, 0)]
    with pytest.raises(StaleAttemptError):
        await append(orchestrator, second)
    # The orchestrator that readmits the expired attempt finds that the next one exists.
    assert await orchestrator.readmit(1, 1, "expired", 2) == Admission(1, 2, 0)
    await asyncio.sleep(0.02)
    assert await learner.plan(1, 0.01) is None
    assert await orchestrator.in_flight() == []
    assert await orchestrator.readmit(1, 2, "expired", 2) is None
    assert (await orchestrator.audit()).counts["failed"] == 1
    assert len(await admit_all(orchestrator)) == 1  # another prompt replaces it


async def test_an_attempt_is_a_straggler_only_after_the_plan_could_wait_for_it(opened: Opener) -> None:
    """Before that, the group may have paused, or the learner may have trained, for longer than the timeout."""
    orchestrator, learner = await opened(groups_per_iteration=1)
    (admission,) = await admit_all(orchestrator)
    run = orchestrator.run
    await run.redis.hset(run.key("ledger"), 0, "admitted 1 0 1000")  # long ago
    await run.redis.hset(run.key("meta"), "orchestrator_since", 1000)
    assert await learner.plan(1, 600) is None
    assert await orchestrator.in_flight() == [admission]
    await run.redis.hset(run.key("meta"), "version_since", 1000)
    assert await learner.plan(1, 600) is None
    assert await orchestrator.in_flight() == [Admission(0, 2, 0)]


async def test_a_paused_group_does_not_expire_and_is_timed_anew_when_it_continues(opened: Opener) -> None:
    """The group waits for the learner's next version, which waits for other groups."""
    orchestrator, learner = await opened(groups_per_iteration=2)
    admissions = await admit_all(orchestrator)
    run = orchestrator.run
    await run.redis.hset(run.key("ledger"), mapping={0: "admitted 1 0 1000", 1: "admitted 1 0 1000"})  # long ago
    await run.redis.hset(run.key("meta"), mapping={"orchestrator_since": 1000, "version_since": 1000})
    await orchestrator.set_paused({0})
    await orchestrator.set_paused({0, 7})  # no such group
    assert await learner.plan(1, 600) is None
    assert await orchestrator.in_flight() == [Admission(0, 1, 0), Admission(1, 2, 0)]
    await orchestrator.set_paused(())
    assert await learner.plan(1, 600) is None
    assert await orchestrator.in_flight() == [admissions[0], Admission(1, 2, 0)]
    await asyncio.sleep(0.02)
    assert await learner.plan(1, 0.01) is None
    assert (await orchestrator.in_flight())[0] == Admission(0, 2, 0)


async def test_what_a_dead_orchestrator_had_paused_is_timed_again(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=1)
    await admit_all(orchestrator)
    await orchestrator.set_paused({0})
    await asyncio.sleep(0.02)
    assert await learner.plan(1, 0.01) is None
    assert (await orchestrator.in_flight())[0].attempt == 1
    await orchestrator.take(Writer.ORCHESTRATOR)
    await asyncio.sleep(0.02)
    assert await learner.plan(1, 0.01) is None
    assert (await orchestrator.in_flight())[0].attempt == 2


async def test_groups_without_a_plan(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=2, max_staleness=1)
    assert await orchestrator.unplanned() == Unplanned(0, 0, (), ())
    first, second, third, fourth = await admit_all(orchestrator)
    for admission in (fourth, second, third):
        await append(orchestrator, admission)
    assert await orchestrator.unplanned() == Unplanned(0, 0, ((0, first.index),), (0, 0, 0))
    assert await learner.plan(1, 60) is not None
    await learner.set_version(1)
    await admit_all(orchestrator)
    assert await orchestrator.unplanned() == Unplanned(1, 1, ((0, 0), (1, 4), (1, 5)), (0,))


async def test_a_new_orchestrator_gets_the_full_time(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=1)
    await orchestrator.admit()
    await orchestrator.run.redis.hset(orchestrator.run.key("ledger"), 0, "admitted 1 0 1000")  # long ago
    assert await orchestrator.in_flight() == [Admission(0, 1, 0)]
    successor = ExperienceLog(orchestrator.run)
    await successor.take(Writer.ORCHESTRATOR)
    assert await learner.plan(1, 600) is None
    assert await successor.in_flight() == [Admission(0, 1, 0)]  # continues under the same attempt
    await append(successor, Admission(0, 1, 0))
    assert await learner.plan(1, 600) == Plan(1, (0,))


async def test_a_replaced_process_changes_nothing(opened: Opener) -> None:
    orchestrator, learner = await opened()
    assert await orchestrator.admit()
    before = await orchestrator.audit()
    for role in Writer:
        await ExperienceLog(orchestrator.run).take(role)
    for act in (
        orchestrator.admit(),
        orchestrator.append(0, 1, b"late", 0, 0.0),
        orchestrator.drop(0, 1, "late", 0.0),
        orchestrator.readmit(0, 1, "late", 1),
        learner.begin(0),
        learner.plan(1, 0),
        learner.set_version(1),
        learner.release(0),
        learner.ack_commit("replica", 0, 1, 0.0, 0.0),
        learner.ack_stage("replica", 0, 1),
    ):
        with pytest.raises(StaleTermError, match="is held by 2"):
            await act
    assert await orchestrator.audit() == before


async def test_changes_need_a_term(run: Run) -> None:
    with pytest.raises(StaleTermError, match="take"):
        await ExperienceLog(run).admit()


async def test_a_term_can_be_shared_inside_a_process(opened: Opener) -> None:
    _, learner = await opened()
    publisher = ExperienceLog(learner.run, learner.term)
    await publisher.ack_commit("replica-1", 0, 1, 0.5, 0.25)
    [(_, commit)] = await publisher.commits("0")
    served = {"replica": "replica-1", "version": 0, "term": 1, "state": "served"}
    assert commit == {**served, "stall_seconds": 0.5, "reload_seconds": 0.25}
    await publisher.ack_stage("replica-1", 1, 1)
    [_, (_, staged)] = await publisher.commits("0")
    assert staged == {"replica": "replica-1", "version": 1, "term": 1, "state": "staged"}


async def test_drops_and_failures_do_not_block_and_keep_their_reasons(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=2)
    first, second = await admit_all(orchestrator)
    assert await orchestrator.drop(first.index, 1, "all scores\nare equal", 1.0)
    assert await orchestrator.readmit(second.index, 1, "the reward raised", 1) is None
    third, fourth = await admit_all(orchestrator)
    await append(orchestrator, third, fourth)
    assert await learner.plan(1, 60) == Plan(1, (2, 3))
    await learner.set_version(1)
    assert await learner.release(1) == 4
    rows = await orchestrator.run.redis.hmget(orchestrator.run.key("ledger"), 0, 1)
    assert rows == [b"dropped 1 1.0 all scores are equal", b"failed 1 the reward raised"]
    assert await orchestrator.append(2, 1, b"again", 0, 0.0) is False  # below the low-water mark


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_rewards_are_finite(opened: Opener, reward: float) -> None:
    orchestrator, _ = await opened()
    await orchestrator.admit()
    with pytest.raises(ValueError, match="finite"):
        await orchestrator.append(0, 1, b"", 0, reward)
    with pytest.raises(ValueError, match="finite"):
        await orchestrator.drop(0, 1, "", reward)


async def test_failed_groups_count_in_a_window(opened: Opener) -> None:
    orchestrator, _ = await opened(groups_per_iteration=100)
    assert await orchestrator.failed_fraction() == 0.0
    admissions = await admit_all(orchestrator)
    for a in admissions[:10]:
        await orchestrator.readmit(a.index, 1, "bad", 1)
    assert await orchestrator.failed_fraction() == 0.2
    await append(orchestrator, *admissions[10:55])
    assert await orchestrator.failed_fraction() == 0.1  # the first five have left the window


async def test_a_resume_replays_the_same_plans(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=2)
    plans = []
    for iteration in range(1, 5):
        await append(orchestrator, *(await admit_all(orchestrator)))
        plans.append(await learner.plan(iteration, 60))
        await learner.set_version(iteration)
    assert await learner.release(2) == 4
    successor = ExperienceLog(learner.run)
    await successor.take(Writer.LEARNER)
    with pytest.raises(TransitionError, match="released up to iteration 2"):
        await successor.begin(1)
    with pytest.raises(TransitionError, match="ahead of the log"):
        await successor.begin(5)
    await successor.begin(2)
    assert await orchestrator.admit() == []
    for plan in plans[2:]:
        assert await successor.plan(plan.iteration, 60) == plan
        assert await successor.read(plan) == [b"payload %d" % index for index in plan.indices]
        await successor.set_version(plan.iteration)
    with pytest.raises(StoreError, match=r"no payload of \[0, 1\]"):
        await successor.read(plans[0])


async def test_a_group_is_never_readmitted_at_an_older_version(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=1)
    for iteration in (1, 2):
        await append(orchestrator, *(await admit_all(orchestrator)))
        await learner.plan(iteration, 60)
        await learner.set_version(iteration)
    (admission,) = await admit_all(orchestrator)
    await learner.begin(0)  # the learner catches up from its checkpoint and reaches version 2 again before iteration 3
    assert await orchestrator.readmit(admission.index, 1, "the replica died", 3) == Admission(2, 2, 2)
    with pytest.raises(TransitionError, match=r"group 2 .*version 2 .*version 0"):
        await orchestrator.append(2, 2, b"", 0, 0.0)


async def test_a_fork_begins_an_empty_log_at_its_checkpoint(opened: Opener) -> None:
    orchestrator, learner = await opened(groups_per_iteration=1)
    await learner.begin(41)
    assert (await learner.version(), await learner.planned()) == (41, 41)
    (admission,) = await orchestrator.admit()
    assert admission == Admission(0, 1, 41)
    await append(orchestrator, admission)
    assert await learner.plan(42, 60) == Plan(42, (0,))
    await learner.set_version(42)
    assert await learner.release(42) == 1
    assert (await learner.audit()).clean


async def test_a_fork_s_groups_count_on_from_its_parent_s(redis: Redis, run_id: str, tmp_path: Path) -> None:
    config = run_config(tmp_path, groups_per_iteration=1, max_attempts=1)
    run = await Run.create(redis, run_id, config, {}, first_group=27)
    orchestrator, learner = ExperienceLog(run), ExperienceLog(run)
    await orchestrator.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(6)
    assert await orchestrator.admit() == [Admission(27, 1, 6)]
    assert await orchestrator.readmit(27, 1, "no score", 1) is None
    assert await orchestrator.failed_fraction(window=1) == 1.0
    (admission,) = await orchestrator.admit()
    assert admission == Admission(28, 1, 6)
    await append(orchestrator, admission)
    assert await learner.plan(7, 60) == Plan(7, (28,))
    await learner.set_version(7)
    assert await learner.release(7) == 29
    resumed = await Run.resume(redis, run_id, config, {})
    assert (await ExperienceLog(resumed).audit()).clean
    orchestrator = ExperienceLog(resumed)
    await orchestrator.take(Writer.ORCHESTRATOR)
    assert await orchestrator.admit() == [Admission(29, 1, 7)]


async def test_waiting_for_a_plan_wakes_up_at_once_and_ends_with_the_run(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    orchestrator, learner = await opened(groups_per_iteration=1)
    await orchestrator.run.set_state(RunState.RUNNING)
    watch, watching, woken = learner.run.watch, asyncio.Event(), []

    async def watched(after: str, block_ms: int) -> tuple[str, list[tuple[str, str]]]:
        watching.set()
        last, signals = await watch(after, block_ms)
        woken.extend(signals)
        return last, signals

    monkeypatch.setattr(learner.run, "watch", watched)
    (admission,) = await orchestrator.admit()
    waiting = asyncio.create_task(learner.wait_plan(1, 60))
    await watching.wait()
    await append(orchestrator, admission)
    assert await waiting == Plan(1, (0,))
    assert woken, "by the signal, not by the heartbeat"
    await learner.set_version(1)
    waiting = asyncio.create_task(learner.wait_plan(2, 60))
    await asyncio.sleep(0.1)
    await orchestrator.run.set_state(RunState.DRAINING)
    assert await waiting is None


async def test_what_has_been_evaluated_never_goes_back(opened: Opener) -> None:
    orchestrator, learner = await opened()
    assert await learner.evaluated() == -1
    for version, newest in [(0, 0), (8, 8), (3, 8), (8, 8)]:
        await orchestrator.set_evaluated(version)
        assert await learner.evaluated() == newest
    await ExperienceLog(orchestrator.run).take(Writer.ORCHESTRATOR)
    with pytest.raises(StaleTermError):
        await orchestrator.set_evaluated(9)


async def test_concurrent_admissions_are_all_different(opened: Opener) -> None:
    orchestrator, _ = await opened(groups_per_iteration=20)
    found = await asyncio.gather(*(orchestrator.admit(most) for most in (1, 2, 3) * 6))
    assert sorted(admission.index for some in found for admission in some) == list(range(20))


async def test_an_orchestrator_changes_its_own_groups_alone(opened: Opener) -> None:
    leader, learner = await opened(groups_per_iteration=3, trainer=trainer(orchestrators=3))
    first, second = (ExperienceLog(leader.run, shard=Shard(number, 3)) for number in (1, 2))
    for log in (first, second):
        await log.take(Writer.ORCHESTRATOR)
    admissions = await leader.admit(3)
    for group, owner in zip(admissions, (leader, first, second), strict=True):
        assert await leader.in_flight(owner.shard) == [group]
        for other in {leader, first, second} - {owner}:
            part = PartialRolloutPart(group.index, 1, 0, b"part")
            for change in (
                other.append(group.index, 1, b"payload", 0, 0.5),
                other.drop(group.index, 1, "equal scores", 0.5),
                other.readmit(group.index, 1, "failed", 2),
                other.save_partial_rollouts([part]),
            ):
                with pytest.raises(StaleTermError):
                    await change
        await append(owner, group)
    for follower in (first, second):
        with pytest.raises(StaleTermError):
            await follower.admit()
        with pytest.raises(StaleTermError):
            await follower.set_evaluated(1)
    assert await learner.plan(1, 60) == Plan(1, (0, 1, 2))


async def test_groups_of_a_new_orchestrator_are_stragglers_later_than_the_others(opened: Opener) -> None:
    leader, learner = await opened(groups_per_iteration=2, trainer=trainer(orchestrators=2))
    follower = ExperienceLog(leader.run, shard=Shard(1, 2))
    await leader.admit(2)
    await asyncio.sleep(2.1)
    await follower.take(Writer.ORCHESTRATOR)
    assert await learner.plan(1, 2.0) is None
    assert {(a.index, a.attempt) for a in await leader.in_flight()} == {(0, 2), (1, 1)}
    await leader.run.redis.hset(leader.run.key("meta"), "orchestrator-1_since", 1000)
    assert await learner.plan(1, 2.0) is None
    assert (await leader.in_flight(follower.shard))[0].attempt == 2


async def test_orchestrators_see_what_the_others_have_paused(opened: Opener) -> None:
    leader, _ = await opened(groups_per_iteration=4, trainer=trainer(orchestrators=2))
    follower = ExperienceLog(leader.run, shard=Shard(1, 2))
    await follower.take(Writer.ORCHESTRATOR)
    await leader.admit(4)
    await leader.set_paused({0, 1})
    await follower.set_paused({2, 3})
    assert (await leader.unplanned()).paused == {0, 3}
    await follower.take(Writer.ORCHESTRATOR)
    assert (await leader.unplanned()).paused == {0}
