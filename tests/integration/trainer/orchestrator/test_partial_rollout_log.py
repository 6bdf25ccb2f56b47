"""What an orchestrator leaves in the log of groups under way, and how its successor goes on from it."""

import asyncio
from functools import partial

import numpy as np
import pytest

from polyreme.api.v1 import rollout_pb2
from polyreme.experience.ledger import ExperienceLog, Role
from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator import main
from polyreme_trainer.orchestrator.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.partial_rollouts import PartialRollouts, SteppedBackError, joined
from support.simulated import ROWS, config_tree, idle_learner, make_run, simulated_replica

PROMPT = np.array([5, 6, 7], np.int32)


def drafts(max_new: int = 64, count: int = 2) -> PartialRollouts:
    return PartialRollouts(count, max_new, (1,))


def chunk(slot: int, ids: list[int], version: int = 0) -> rollout_pb2.GenerateResponse:
    array = np.array(ids, "<i4")
    logprobs = (-array).astype("<f4").tobytes()
    return rollout_pb2.GenerateResponse(
        chunks=[rollout_pb2.Chunk(slot=slot, token_ids=array.tobytes(), logprobs=logprobs, oldest_version=version)]
    )


async def test_only_what_is_new_of_groups_that_last_is_written(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Role.ORCHESTRATOR)
    await learner.take(Role.LEARNER)
    await learner.begin(0)
    first, second = await log.admit(2)
    snapshots = PartialRolloutLog(log, interval=3600.0)
    with snapshots.of(first, PROMPT, drafts()) as growing, snapshots.of(second, PROMPT, drafts()):
        growing.add(chunk(0, [9] * 20))
        await snapshots.write()
        assert await log.drafts([first, second]) == {}  # it is younger than the interval
        snapshots._interval = 0.0
        await snapshots.write()
        await snapshots.write()
        assert [len(parts) for parts in (await log.drafts([first, second])).values()] == [1]
        growing.add(chunk(1, [8] * 16))
        await snapshots.write()
        one, two = (await log.drafts([first]))[first.index]
        assert len(two) < len(one)
    successor = PartialRolloutLog(log)
    await successor.load([first, second])
    with successor.of(first, PROMPT, drafts()) as restored:
        assert [draft.ids for draft in restored.drafts] == [draft.ids for draft in growing.drafts]
    await log.append(first.index, 1, b"payload", 0, 0.0)
    assert await log.drafts([first]) == {}
    assert (await log.audit()).clean


async def test_drafts_that_were_cut_are_kept_as_they_are_now(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Role.ORCHESTRATOR)
    await learner.take(Role.LEARNER)
    await learner.begin(0)
    (admission,) = await log.admit(1)
    snapshots = PartialRolloutLog(log, interval=0.0)
    with snapshots.of(admission, PROMPT, PartialRollouts(1, 64, (1,), min_version=1)) as growing:
        growing.add(chunk(0, [9] * 16, version=1))
        with pytest.raises(SteppedBackError):
            growing.add(chunk(0, [8] * 16, version=0))
        await snapshots.write()
        growing.drop_older()
        growing.add(chunk(0, [7] * 20, version=1))
        await snapshots.write()
        parts = (await log.drafts([admission]))[admission.index]
    (draft,) = joined(parts, PROMPT, PartialRollouts(1, 64, (1,), min_version=1)).drafts
    assert draft.token_ids().tolist() == [9] * 16 + [7] * 20
    assert draft.spans == [(1, 0, 36)]


async def test_drafts_of_another_prompt_are_replaced(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Role.ORCHESTRATOR)
    await learner.take(Role.LEARNER)
    await learner.begin(0)
    (admission,) = await log.admit(1)
    for prompt in (PROMPT, PROMPT + 1):
        snapshots = PartialRolloutLog(log, interval=0.0)
        await snapshots.load([admission])
        with snapshots.of(admission, prompt, drafts()) as growing:
            assert growing.tokens() == 0
            growing.add(chunk(0, [9] * 20))
            await snapshots.write()
    (part,) = (await log.drafts([admission]))[admission.index]
    assert joined([part], PROMPT + 1, drafts()).tokens() == 20


async def test_a_successor_goes_on_from_what_was_kept(redis, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "PartialRolloutLog", partial(PartialRolloutLog, interval=0.05))
    run = await make_run(redis, run_id, config_tree(tmp_path, ROWS, iterations=1))
    log = ExperienceLog(run)
    async with (
        simulated_replica(run, "r0", step_seconds=0.005, lengths=Lengths(1e9)) as replica,
        serve((await run.config()).reward, run=run),
        idle_learner(run, [replica]) as learner,
    ):
        await run.set_state(RunState.RUNNING)
        killed = asyncio.create_task(main.orchestrate(run))
        while not await log.drafts(in_flight := await log.in_flight()):  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.02)
        killed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killed
        kept = await log.drafts(in_flight)
        before = len(replica.calls)
        await asyncio.gather(main.orchestrate(run), learner.train([1], [replica]))
        prefixes = {
            (call.request_id.split("-")[1], slot.index): slot.prefix_ids for call in replica.calls[before:] for slot in call.slots
        }
        groups = {group.index: group for group in learner.trained[1]}
        assert kept
        for index, parts in kept.items():
            restored = joined(parts, groups[index].prompt_ids, drafts(max_new=96, count=3))
            for draft, sample in zip(restored.drafts, groups[index].samples, strict=True):
                assert prefixes[str(index), draft.index] == draft.ids
                assert sample.token_ids.tobytes().startswith(draft.ids)
                assert len(sample.token_ids) == 96
        assert {group.attempt for group in groups.values()} == {1}
        assert (await log.audit()).clean
