"""Several orchestrators in one run: what each does, and what only the leading one does."""

import asyncio

import pytest

from polyreme.experience.run import Run, RunState
from polyreme_rollout.engine.protocol import Sampling
from polyreme_rollout.testing.simulated_engine import Lengths, sample
from polyreme_trainer.orchestrator.main import orchestrate
from polyreme_trainer.orchestrator.prompts.prompt_order import PromptOrder, sequence_seed
from support.simulated import ROWS, VOCAB
from support.tiny_tokenizer import model_files
from support.waiting import until

FAST = {"lengths": Lengths(20, spread=0.5)}
THREE = {"trainer": {"orchestrators": 3}}


async def all_of(w, train=True):
    """Runs three orchestrators to the end."""
    training = [w.train()] if train else []
    await asyncio.wait_for(asyncio.gather(*(orchestrate(w.run, number) for number in range(3)), *training), 300)


async def test_every_token_is_that_of_its_group_whoever_samples_it(world):
    async with world(FAST, FAST, iterations=3, groups_per_iteration=5, **THREE) as w:
        policies = {0: w.replicas[0].engine.policy}

        async def train():
            for iteration in (1, 2, 3):
                await w.learner.train([iteration], w.replicas)
                policies[iteration] = w.replicas[0].engine.policy

        await asyncio.gather(all_of(w, train=False), train())
        assert (await w.log.audit()).clean
        groups = [group for groups in w.learner.trained.values() for group in groups]
        assert [group.index for group in groups] == list(range(15))
        for group in groups:
            row = ROWS[PromptOrder(0, [len(ROWS)]).row_of(group.index)]
            assert group.prompt == f"<user>{row['prompt']}<assistant>"
            for slot, each in enumerate(group.samples):
                seed, sampling = sequence_seed(0, group.index, 1, slot, 0), Sampling(1.0, 1.0, -1, (1,))
                policy, prompt = policies[group.index // 5], group.prompt_ids.tolist()
                assert each.token_ids.tolist() == sample(policy, prompt, seed, sampling, 96, VOCAB, FAST["lengths"])[0]


async def test_the_leading_one_reports_for_all(world):
    rule = {"algorithm": {"preset": "grpo", "dynamic_sampling": True}}
    async with world(FAST, iterations=3, groups_per_iteration=6, eval_rows=ROWS[:5], eval_interval=2, **rule, **THREE) as w:
        await all_of(w)
        assert (await w.log.audit()).clean
        assert [record["version"] for record in await w.records("eval")] == [0, 2, 3]
        records = await w.records("rollout")
        assert [record["iteration"] for record in records] == [1, 2, 3]
        assert all(len(record["groups"]) == 3 and record["time/rollout_wait"] >= 0 for record in records)
        counts = (await w.log.audit()).counts
        ended = sum(counts[state] for state in ("appended", "dropped", "planned", "released"))
        told = await w.log.reports()
        assert sum(line["groups"] for _, line in told.values()) + sum(record["groups"][0] for record in records) == ended
        assert sum("training prompts" in record["text"] for record in await w.records("notice")) == 1


async def test_they_share_the_places_of_a_replica(world):
    """Each has a third of its nine places, and the last group that an orchestrator sends there may exceed them by two samples."""
    slow = {"step_seconds": 0.002, "lengths": Lengths(60), "max_num_seqs": 9}
    sections = {"rollout": {"max_num_seqs": 9}, "groups_per_iteration": 9, "iterations": 1}
    async with world(slow, **sections, **THREE) as w:
        most = 0

        async def watch():
            nonlocal most
            while True:
                most = max(most, len(w.replicas[0].running))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        await all_of(w)
        watching.cancel()
        assert 3 < most <= 3 * (3 + 2)
        assert (await w.log.audit()).clean


@pytest.mark.parametrize("number", [0, 2])
async def test_a_successor_continues_the_groups_of_its_predecessor_alone(world, number):
    slow = {"step_seconds": 0.004, "lengths": Lengths(60)}
    async with world(slow, groups_per_iteration=6, **THREE) as w:
        tasks = [asyncio.create_task(orchestrate(w.run, each)) for each in range(3)]
        await w.replicas[0].asked.wait()

        async def all_fly():
            return len(await w.log.in_flight()) == 6

        await until(all_fly)
        tasks[number].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[number]
        flying = [group.index for group in await w.log.in_flight() if group.index % 3 == number]
        tasks[number] = asyncio.create_task(orchestrate(w.run, number))
        await asyncio.wait_for(asyncio.gather(*tasks, w.train()), 300)
        assert (await w.log.audit()).clean
        taken = [record for record in await w.records("notice") if "took over" in record["text"]]
        assert [(each["service"].partition("-")[2], each["text"]) for each in taken] == [
            (str(number or ""), f"took over {len(flying)} groups in flight")
        ]
        assert {group.attempt for groups in w.learner.trained.values() for group in groups} == {1}


async def test_a_resume_may_change_their_number(world, redis):
    slow = {"step_seconds": 0.004, "lengths": Lengths(60)}
    async with world(slow, groups_per_iteration=6) as w:
        alone = asyncio.create_task(orchestrate(w.run))
        await w.replicas[0].asked.wait()
        alone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await alone
        assert len(await w.log.in_flight()) == 6
        trainer = w.config.trainer.model_copy(update={"orchestrators": 3})
        w.run = await Run.resume(redis, w.run.run_id, w.config.model_copy(update={"trainer": trainer}), model_files())
        await w.run.set_state(RunState.RUNNING)
        await all_of(w)
        assert (await w.log.audit()).clean
        taken = [record["text"] for record in await w.records("notice") if "took over" in record["text"]]
        assert taken == ["took over 2 groups in flight"] * 3
        assert {group.attempt for groups in w.learner.trained.values() for group in groups} == {1}


async def test_groups_of_all_wait_for_a_token_budget_and_none_for_ever(world):
    long = {"lengths": Lengths(1e9), "step_seconds": 0.0005}
    rollout = {"max_new_tokens": 64, "max_model_len": 128, "tokens_per_iteration": 24}
    async with world(long, iterations=6, groups_per_iteration=4, max_staleness=3, rollout=rollout, **THREE) as w:
        await all_of(w)
        assert (await w.log.audit()).clean
        samples = [(iteration, s) for iteration, groups in w.learner.trained.items() for group in groups for s in group.samples]
        assert all(len(s.token_ids) == 64 for _, s in samples)
        assert max(len(s.spans) for _, s in samples) > 1, "no sample paused"
        assert max(iteration - 1 - s.spans[0][0] for iteration, s in samples) <= 3
        assert sum(record["rollout/paused_samples"] for record in await w.records("rollout")) > 0
