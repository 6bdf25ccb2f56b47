"""What an orchestrator leaves in the log of groups under way, and how its successor goes on from it."""

import asyncio
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import rollout_pb2
from polyreme.experience.ledger import ExperienceLog, Role
from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator import main
from polyreme_trainer.orchestrator.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.partial_rollouts import (
    PartialRolloutError,
    PartialRollouts,
    SteppedBackError,
    join_parts,
    part_since,
)
from support.simulated import ROWS, config_tree, idle_learner, make_run, simulated_replica

PROMPT = np.array([5, 6, 7], np.int32)


def rollouts(max_new: int = 64, count: int = 2) -> PartialRollouts:
    return PartialRollouts(count, max_new, (1,))


def chunk(slot: int, ids: list[int], version: int = 0) -> rollout_pb2.GenerateResponse:
    array = np.array(ids, "<i4")
    logprobs = (-array).astype("<f4").tobytes()
    return rollout_pb2.GenerateResponse(
        chunks=[rollout_pb2.Chunk(slot=slot, token_ids=array.tobytes(), logprobs=logprobs, oldest_version=version)]
    )


def end(slot: int, length: int) -> rollout_pb2.GenerateResponse:
    spans = [{"version": 1, "start": 0, "end": length}]
    return rollout_pb2.GenerateResponse(ends=[rollout_pb2.SlotEnd(slot=slot, finish_reason=2, spans=spans)])


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 1), st.lists(st.integers(2, 40), min_size=1, max_size=9)), st.none()), max_size=12
    )
)
def test_parts_make_up_the_drafts_whenever_they_are_cut(steps):
    there, parts = rollouts(max_new=1000), []
    marks = there.marks()
    for step in steps:
        if step:
            there.add(chunk(*step, version=len(parts)))
        else:
            parts.append(part_since(marks, there, PROMPT))
            marks = there.marks()
    if there.samples[0].length:
        there.add(end(0, there.samples[0].length))
    parts.append(part_since(marks, there, PROMPT))
    again = join_parts(parts, PROMPT, rollouts(max_new=1000))
    for before, after in zip(there.samples, again.samples, strict=True):
        assert (before.ids, before.logprobs, before.spans, before.finish_reason) == (
            after.ids, after.logprobs, after.spans, after.finish_reason,
        )  # fmt: skip


def test_what_does_not_fit_is_refused():
    there = rollouts()
    there.add(chunk(0, [9] * 20))
    part = part_since(rollouts().marks(), there, PROMPT)
    for prompt, blank in ((PROMPT + 1, rollouts()), (PROMPT, rollouts(count=3)), (PROMPT, rollouts(max_new=19))):
        with pytest.raises(PartialRolloutError):
            join_parts([part], prompt, blank)
    with pytest.raises(PartialRolloutError):
        join_parts([part, part], PROMPT, rollouts())  # its spans begin at nought again


async def test_only_what_is_new_of_groups_that_last_is_written(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Role.ORCHESTRATOR)
    await learner.take(Role.LEARNER)
    await learner.begin(0)
    first, second = await log.admit(2)
    partial_log = PartialRolloutLog(log, interval=0.05)
    with partial_log.track(first, PROMPT, rollouts()) as growing, partial_log.track(second, PROMPT, rollouts()):
        growing.add(chunk(0, [9] * 20))
        await partial_log.save()
        assert await log.partial_rollouts([first, second]) == {}  # it is younger than the interval
        await asyncio.sleep(0.06)
        await partial_log.save()
        await partial_log.save()
        assert [len(parts) for parts in (await log.partial_rollouts([first, second])).values()] == [1]
        growing.add(chunk(1, [8] * 16))
        await partial_log.save()
        one, two = (await log.partial_rollouts([first]))[first.index]
        assert len(two) < len(one)
    successor = PartialRolloutLog(log)
    await successor.load([first, second])
    with successor.track(first, PROMPT, rollouts()) as restored:
        assert [one.ids for one in restored.samples] == [one.ids for one in growing.samples]
    await log.append(first.index, 1, b"payload", 0, 0.0)
    assert await log.partial_rollouts([first]) == {}
    assert (await log.audit()).clean


async def test_drafts_that_were_cut_are_kept_as_they_are_now(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Role.ORCHESTRATOR)
    await learner.take(Role.LEARNER)
    await learner.begin(0)
    (admission,) = await log.admit(1)
    partial_log = PartialRolloutLog(log, interval=0.0)
    with partial_log.track(admission, PROMPT, PartialRollouts(1, 64, (1,), min_version=1)) as growing:
        growing.add(chunk(0, [9] * 16, version=1))
        with pytest.raises(SteppedBackError):
            growing.add(chunk(0, [8] * 16, version=0))
        await partial_log.save()
        growing.drop_older()
        growing.add(chunk(0, [7] * 20, version=1))
        await partial_log.save()
        parts = (await log.partial_rollouts([admission]))[admission.index]
    (one,) = join_parts(parts, PROMPT, PartialRollouts(1, 64, (1,), min_version=1)).samples
    assert one.token_ids().tolist() == [9] * 16 + [7] * 20
    assert one.spans == [(1, 0, 36)]


async def test_drafts_of_another_prompt_are_replaced(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Role.ORCHESTRATOR)
    await learner.take(Role.LEARNER)
    await learner.begin(0)
    (admission,) = await log.admit(1)
    for prompt in (PROMPT, PROMPT + 1):
        partial_log = PartialRolloutLog(log, interval=0.0)
        await partial_log.load([admission])
        with partial_log.track(admission, prompt, rollouts()) as growing:
            assert growing.tokens() == 0
            growing.add(chunk(0, [9] * 20))
            await partial_log.save()
    (part,) = (await log.partial_rollouts([admission]))[admission.index]
    assert join_parts([part], PROMPT + 1, rollouts()).tokens() == 20


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
        while not await log.partial_rollouts(in_flight := await log.in_flight()):  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.02)
        killed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killed
        kept = await log.partial_rollouts(in_flight)
        before = len(replica.calls)
        await asyncio.gather(main.orchestrate(run), learner.train([1], [replica]))
        prefixes = {
            (call.request_id.split("-")[1], slot.index): slot.prefix_ids for call in replica.calls[before:] for slot in call.slots
        }
        groups = {group.index: group for group in learner.trained[1]}
        assert kept
        for index, parts in kept.items():
            restored = join_parts(parts, groups[index].prompt_ids, rollouts(max_new=96, count=3))
            for one, sample in zip(restored.samples, groups[index].samples, strict=True):
                assert prefixes[str(index), one.index] == one.ids
                assert sample.token_ids.tobytes().startswith(one.ids)
                assert len(sample.token_ids) == 96
        assert {group.attempt for group in groups.values()} == {1}
        assert (await log.audit()).clean
