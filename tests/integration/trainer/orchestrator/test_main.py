"""The orchestrator from admission to the log: real Redis, gRPC, rewards and pushes; simulated replicas, and a learner that does not
train."""

import asyncio
import json
import os
import signal
import sys

import pytest

from polyreme.errors import StaleTermError
from polyreme.experience.run import RunState
from polyreme.process.lifecycle import Child
from polyreme_rollout.engine.protocol import Sampling
from polyreme_rollout.testing.simulated_engine import Failures, Lengths, sample
from polyreme_trainer.orchestrator.main import orchestrate
from polyreme_trainer.orchestrator.prompts.prompt_order import PromptOrder, sequence_seed
from support.simulated import ROWS, VOCAB
from support.waiting import until

FAST = {"lengths": Lengths(20, spread=0.5)}


async def test_a_run_from_admission_to_the_last_evaluation(world):
    async with world(
        FAST, FAST, eval_rows=ROWS[:7], iterations=3, eval_interval=2, eval_samples=6, seed=5
    ) as w:  # fmt: skip
        await asyncio.gather(orchestrate(w.run), w.train())
        audit = await w.log.audit()
        assert audit.clean, audit
        assert sorted(w.learner.trained) == [1, 2, 3]
        indices = [group.index for groups in w.learner.trained.values() for group in groups]
        assert sorted(indices) == list(range(12))
        for iteration, groups in w.learner.trained.items():
            for group in groups:
                row = ROWS[PromptOrder(5, [len(ROWS)]).row_of(group.index)]
                assert (group.prompt, group.label) == (f"<user>{row['prompt']}<assistant>", row["answer"])
                assert len(group.samples) == 3 and group.attempt == 1
                assert {span[0] for sample in group.samples for span in sample.spans} == {iteration - 1}
                assert all(sample.loss_mask.all() and sample.parts[0].name == "exact" for sample in group.samples)
        evals = await w.records("eval")
        assert [record["version"] for record in evals] == [0, 2, 3]
        assert all(record["samples"] == 6 and len(record["examples"]) == 5 for record in evals)
        assert all(0.0 <= record["accuracy"] <= 1.0 and record["parts"] == {"exact": record["accuracy"]} for record in evals)
        for record in evals:
            file = w.config.run_dir / "samples" / f"evaluation_{record['version']:04d}.jsonl"
            answers = [json.loads(line) for line in file.read_text().splitlines()]
            assert [(answer["version"], answer["row"]) for answer in answers] == [(record["version"], row) for row in range(6)]
            assert sum(answer["score"] for answer in answers) / 6 == pytest.approx(record["accuracy"])
            assert [answer["label"] for answer in answers] == [str(row["answer"]) for row in ROWS[:6]]
            assert all(answer["parts"].keys() == {"exact"} and answer["tokens"] > 0 for answer in answers)
        assert all(replica.calls for replica in w.replicas)


async def test_one_call_per_group_and_a_seed_per_sample(world):
    async with world(iterations=1) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        calls = w.replicas[0].calls
        seeds = {slot.seed: call.request_id for call in calls for slot in call.slots}
        assert len(calls) == 4 and len(seeds) == 12
        for group in w.learner.trained[1]:
            for slot in range(3):
                seed = sequence_seed(0, group.index, 1, slot, 0)
                assert seeds[seed].startswith(f"group-{group.index}-1-")
                sampling = Sampling(1.0, 1.0, -1, (1,))
                policy = w.policies[0]
                ids, _ = sample(policy, group.prompt_ids.tolist(), seed, sampling, 96, VOCAB, FAST["lengths"])
                assert group.samples[slot].token_ids.tolist() == ids


async def test_overlong_prompts_are_filtered_counted_and_reported(world):
    rows = [*ROWS, {"prompt": "1" * 40, "answer": "x"}]
    async with world(rows=rows, iterations=1) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        assert any("25 training prompts, 1 filtered as too long" in record["text"] for record in await w.records("notice"))


async def test_a_replica_that_dies_midrun_is_survived(world):
    async with world({**FAST, "failures": Failures(die_after=40)}, FAST, iterations=3) as w:
        await asyncio.gather(orchestrate(w.run), self_healing(w))
        assert (await w.log.audit()).clean and len(w.learner.trained) == 3
        assert w.replicas[0].engine.dead


async def self_healing(w):
    """Pushes only to the live replica, as the publisher would."""
    await w.learner.train(range(1, w.config.iterations + 1), w.replicas[1:])


async def test_takeover(world):
    slow = {"step_seconds": 0.004, "lengths": Lengths(60)}
    async with world(slow) as w:
        first = asyncio.create_task(orchestrate(w.run))
        await w.replicas[0].asked.wait()
        training = asyncio.create_task(w.train())
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        flying = await w.log.in_flight()
        assert flying
        await orchestrate(w.run)
        await training
        assert (await w.log.audit()).clean
        taken = [record["text"] for record in await w.records("notice") if "took over" in record["text"]]
        assert taken == [f"took over {len(flying)} groups in flight"]
        assert {group.attempt for groups in w.learner.trained.values() for group in groups} == {1}


async def test_a_successor_goes_on_with_the_replicas_that_are_left(world):
    """A run starts when all configured replicas are registered. Once it runs, one of them is enough."""
    async with world(iterations=1, rollout={"replicas": 2}) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        assert (await w.log.audit()).clean


async def test_a_zombie_ends_without_touching_the_run(world):
    slow = {"step_seconds": 0.005, "lengths": Lengths(60)}
    async with world(slow) as w:
        zombie = asyncio.create_task(orchestrate(w.run))
        await w.replicas[0].asked.wait()
        await asyncio.gather(orchestrate(w.run), w.train())
        with pytest.raises(StaleTermError):
            await zombie
        assert (await w.log.audit()).clean
        assert (await w.run.state())[0] is RunState.RUNNING


async def test_an_expired_attempt_is_replaced(world):
    """A silent replica holds a group. The learner's plan lets the attempt expire, and the next attempt runs elsewhere."""
    silent = {"lengths": Lengths(1e9), "failures": Failures(silent_after=16)}
    async with world(silent, FAST, iterations=1) as w:
        working = asyncio.create_task(orchestrate(w.run))
        await w.replicas[0].asked.wait()
        plan = None
        while plan is None:
            plan = await w.learner.log.plan(1, 2.0)
            await asyncio.sleep(0.1)
        await w.train()
        await working
        assert max(group.attempt for group in w.learner.trained[1]) >= 2
        assert (await w.log.audit()).clean


async def test_a_group_whose_task_is_lost_is_taken_up_again(world):
    slow = {"step_seconds": 0.004, "lengths": Lengths(60)}
    async with world(slow, iterations=1) as w:
        working = asyncio.create_task(orchestrate(w.run))
        await until(lambda: len(w.replicas[0].calls) == 4)  # the replica has an event for its first call only
        groups = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "GroupTasks._make_group"]
        groups[0].cancel()  # a task group ignores it
        await asyncio.wait_for(asyncio.gather(working, w.train()), 300)
        assert (await w.log.audit()).clean
        assert {group.attempt for group in w.learner.trained[1]} == {1}
        calls = [call.request_id.rpartition("-")[0] for call in w.replicas[0].calls]
        assert len(calls) == 5 and len(set(calls)) == 4, "one of them alone was generated again"


async def test_drain(world):
    slow = {"step_seconds": 10.0, "lengths": Lengths(1e9)}
    async with world(slow) as w:
        working = asyncio.create_task(orchestrate(w.run))
        await w.replicas[0].asked.wait()
        await w.run.set_state(RunState.DRAINING, "a signal")
        await asyncio.wait_for(working, 300)
        assert await w.log.in_flight()


async def test_a_signal_ends_the_process_whose_run_goes_on_as_one_to_start_again(world):
    slow = {"step_seconds": 10.0, "lengths": Lengths(1e9)}
    async with world(slow) as w:
        child = Child.spawn(
            "orchestrator",
            [sys.executable, "-m", "polyreme_trainer.orchestrator"],
            {**os.environ, "POLYREME_REDIS": w.redis_url, "POLYREME_RUN": w.run.run_id},
        )
        await asyncio.wait_for(w.replicas[0].asked.wait(), 300)
        child.signal(signal.SIGTERM)
        assert await asyncio.wait_for(child.wait(), 300) == 128 + signal.SIGTERM
        assert (await w.run.state())[0] is RunState.RUNNING and await w.log.in_flight()


async def test_generation_overlaps_training_within_the_bound(world):
    """With two replicas of different speed and swaps in between, no sample is discarded, and none is older than allowed."""
    slow, fast = ({"step_seconds": seconds, "lengths": Lengths(40, spread=1.0)} for seconds in (0.004, 0.001))
    async with world(slow, fast, iterations=8, max_staleness=2) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        audit = await w.log.audit()
        assert audit.clean and sorted(w.learner.trained) == list(range(1, 9))
        lags, mixed = [], 0
        for iteration, groups in w.learner.trained.items():
            for sample in (sample for group in groups for sample in group.samples):
                versions = [span[0] for span in sample.spans]
                lags.append(iteration - 1 - min(versions))
                mixed += len(set(versions)) > 1
                assert [start for _, start, _ in sample.spans[1:]] == [end for _, _, end in sample.spans[:-1]]
        assert 0 < max(lags) <= 2 and min(lags) >= 0
        assert mixed, "no sample went on over a swap"
        assert {group.attempt for groups in w.learner.trained.values() for group in groups} == {1}
        waits = await w.records("rollout")
        assert [record["iteration"] for record in waits] == sorted({record["iteration"] for record in waits})
        assert waits[-1]["iteration"] == 8 and all(record["time/rollout_wait"] >= 0 for record in waits)
