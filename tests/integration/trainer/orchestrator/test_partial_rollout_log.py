"""The partial rollouts that an orchestrator saves in the log, and from which its successor continues."""

import asyncio
from functools import partial

import numpy as np
import pytest

from polyreme.api.v1 import experience_pb2
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_rollout.engine.protocol import Sampling
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_rollout.testing.simulated_engine import sample as sampled
from polyreme_trainer.orchestrator import main
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollouts, SteppedBackError
from polyreme_trainer.orchestrator.generation.rollout_parts import RolloutParts, join_parts
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed
from support.chunks import chunk, rollouts
from support.simulated import ROWS, VOCAB, config_tree, idle_learner, make_run, simulated_replica

PROMPT = np.array([5, 6, 7], np.int32)
SAMPLING = Sampling(1.0, 1.0, -1, (1,))


async def test_only_what_is_new_of_groups_that_last_is_written(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    first, second = await log.admit(2)
    partial_log = PartialRolloutLog(log, interval=3600.0)
    with (
        partial_log.track(first, RolloutParts(PROMPT, rollouts())) as growing,
        partial_log.track(second, RolloutParts(PROMPT, rollouts())),
    ):
        growing.rollouts.add(chunk(0, [9] * 20))
        await partial_log.save()
        assert await log.partial_rollouts([first, second]) == {}  # it is younger than the interval
        partial_log._interval = 0.0
        await partial_log.save()
        await partial_log.save()
        assert [len(parts) for parts in (await log.partial_rollouts([first, second])).values()] == [1]
        growing.rollouts.add(chunk(1, [8] * 16))
        await partial_log.save()
        one, two = (await log.partial_rollouts([first]))[first.index]
        assert len(two) < len(one)
    successor = PartialRolloutLog(log)
    await successor.load([first, second])
    with successor.track(first, RolloutParts(PROMPT, rollouts())) as restored:
        assert [sample.ids for sample in restored.rollouts.samples] == [sample.ids for sample in growing.rollouts.samples]
    await log.append(first.index, 1, b"payload", 0, 0.0)
    assert await log.partial_rollouts([first]) == {}
    assert (await log.audit()).clean


async def test_drafts_that_were_cut_are_kept_as_they_are_now(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    (admission,) = await log.admit(1)
    partial_log = PartialRolloutLog(log, interval=0.0)
    with partial_log.track(admission, RolloutParts(PROMPT, PartialRollouts(1, 64, (1,), min_version=1))) as growing:
        growing.rollouts.add(chunk(0, [9] * 16, version=1))
        with pytest.raises(SteppedBackError):
            growing.rollouts.add(chunk(0, [8] * 16, version=0))
        await partial_log.save()
        growing.rollouts.drop_older()
        growing.rollouts.add(chunk(0, [7] * 20, version=1))
        await partial_log.save()
        parts = (await log.partial_rollouts([admission]))[admission.index]
    (sample,) = join_parts(parts, PROMPT, PartialRollouts(1, 64, (1,), min_version=1)).samples
    assert sample.token_ids().tolist() == [9] * 16 + [7] * 20
    assert sample.spans == [(1, 0, 36)]


async def test_drafts_of_another_prompt_are_replaced(run):
    log, learner = ExperienceLog(run), ExperienceLog(run)
    await log.take(Writer.ORCHESTRATOR)
    await learner.take(Writer.LEARNER)
    await learner.begin(0)
    (admission,) = await log.admit(1)
    for prompt in (PROMPT, PROMPT + 1):
        partial_log = PartialRolloutLog(log, interval=0.0)
        await partial_log.load([admission])
        with partial_log.track(admission, RolloutParts(prompt, rollouts())) as growing:
            assert growing.rollouts.tokens() == 0
            growing.rollouts.add(chunk(0, [9] * 20))
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
            for restored_sample, sample in zip(restored.samples, groups[index].samples, strict=True):
                if restored_sample.length < 96:  # complete sequences need no call
                    assert prefixes[str(index), restored_sample.index] == restored_sample.ids
                assert sample.token_ids.tobytes().startswith(restored_sample.ids)
                assert len(sample.token_ids) == 96
        assert {group.attempt for group in groups.values()} == {1}
        assert (await log.audit()).clean


PAUSES = {"max_staleness": 2, "rollout": {"tokens_per_iteration": 32}}
"""Token budget for samples of 96 tokens: three parts, of up to three versions."""


async def test_samples_pause_at_their_budget_and_a_successor_continues_them(redis, run_id, tmp_path):
    """No token is generated twice, since paused samples are saved in the log at once."""
    run = await make_run(redis, run_id, config_tree(tmp_path, ROWS, iterations=3, **PAUSES))
    log = ExperienceLog(run)
    async with (
        simulated_replica(run, "r0", lengths=Lengths(1e9)) as replica,
        serve((await run.config()).reward, run=run),
        idle_learner(run, [replica]) as learner,
    ):
        await run.set_state(RunState.RUNNING)
        killed = asyncio.create_task(main.orchestrate(run))

        async def paused() -> dict[int, list[bytes]]:
            """The parts of the 8 groups that the first plan does not need."""
            return await log.partial_rollouts(await log.in_flight())

        while len((await log.unplanned()).appended) < 4 or len(await paused()) < 8:  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.02)
        killed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killed
        admitted = {admission.index for admission in await log.in_flight()}
        assert admitted == set(range(4, 12)), "the oldest groups went on beyond the budget, since the plan needed them"
        for parts in (await paused()).values():
            (group,) = (experience_pb2.Group.FromString(part) for part in parts)
            assert [len(sample.token_ids) for sample in group.samples] == [4 * 32] * 3
        await asyncio.gather(main.orchestrate(run), learner.train([1, 2, 3], [replica]))
        groups = [group for groups in learner.trained.values() for group in groups]
        assert sorted(group.index for group in groups) == list(range(12)) and (await log.audit()).clean
        assert replica.engine.tokens == sum(len(sample.token_ids) for group in groups for sample in group.samples) == 12 * 3 * 96
        records = [record for _, record in await run.records("0", 0) if record["kind"] == "rollout"]
        assert sum(record["rollout/paused_samples"] for record in records) > 0
        assert all(record["rollout/parts_beyond_budget"] >= 0 for record in records)


async def test_each_part_has_the_logprobs_of_the_version_that_sampled_it(redis, run_id, tmp_path):
    run = await make_run(redis, run_id, config_tree(tmp_path, ROWS, iterations=4, **PAUSES))
    lengths = Lengths(60, spread=0.7)
    async with (
        simulated_replica(run, "r0", step_seconds=0.001, lengths=lengths) as replica,
        serve((await run.config()).reward, run=run),
        idle_learner(run, [replica]) as learner,
    ):
        await run.set_state(RunState.RUNNING)
        policies = {0: replica.engine.policy}

        async def train() -> None:
            for iteration in range(1, 5):
                await learner.train([iteration], [replica])
                policies[iteration] = replica.engine.policy

        await asyncio.gather(main.orchestrate(run), train())
    starts = {
        (call.request_id.rpartition("-")[0], slot.index, len(slot.prefix_ids) // 4)
        for call in replica.calls
        for slot in call.slots
    }
    several = 0
    for iteration, groups in learner.trained.items():
        for group in groups:
            for index, sample in enumerate(group.samples):
                versions = [version for version, _, _ in sample.spans]
                assert iteration - 1 - min(versions) <= 2
                several += len(versions) > 1
                for version, start, end in sample.spans:
                    if (f"group-{group.index}-{group.attempt}", index, start) not in starts:
                        continue  # it began in a running call, during which weights were swapped
                    seed = sequence_seed(0, group.index, group.attempt, index, start)
                    before = [*group.prompt_ids.tolist(), *sample.token_ids[:start].tolist()]
                    end = min(
                        [
                            end,
                            *(
                                other
                                for *key, other in starts
                                if key == [f"group-{group.index}-{group.attempt}", index] and other > start
                            ),
                        ]
                    )
                    ids, logprobs = sampled(policies[version], before, seed, SAMPLING, end - start, VOCAB, lengths)
                    assert sample.token_ids[start:end].tolist() == ids
                    assert sample.logprobs[start:end].tolist() == np.float32(logprobs).tolist()
    assert several > 0, "no sample was carried over"
