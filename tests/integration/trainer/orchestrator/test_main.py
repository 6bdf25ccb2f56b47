"""The orchestrator from admission to the log: real Redis, gRPC, rewards and pushes; simulated replicas, a learner that trains nothing."""

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from polyreme.cli.progress import evaluation_of
from polyreme.errors import ConfigError, DataError, RunFailedError, StaleTermError, UnavailableError
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import RunState
from polyreme.process.lifecycle import Child
from polyreme_reward.server import serve
from polyreme_rollout.engine.protocol import Sampling
from polyreme_rollout.testing.simulated_engine import Failures, Lengths, sample
from polyreme_trainer.orchestrator.main import orchestrate
from polyreme_trainer.orchestrator.prompt_order import row_of, sequence_seed
from support.simulated import ROWS, VOCAB, config_tree, idle_learner, make_run, simulated_replica
from support.tiny_tokenizer import CHAT_TEMPLATE
from support.waiting import until

FAST = {"lengths": Lengths(20, spread=0.5)}
PLUGIN = """
def reward(response, label, **rest):
    if label == "bad":
        raise ValueError("cannot score this")
    return float(len(response) % 2)
"""


@pytest.fixture
def world(redis, run_id, tmp_path, redis_url):
    """`async with world(...)`: a run with its services, in state running at version 0."""

    @asynccontextmanager
    async def world(*replicas, rows=ROWS, eval_rows=(), files=None, reward_server=True, plugin=False, **sections):
        if plugin:
            (tmp_path / "plugin.py").write_text(PLUGIN)
            rewards = {"rewards": [{"file": str(tmp_path / "plugin.py")}]}
            sections["reward"] = rewards | sections.get("reward", {})
        if eval_rows:
            (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in eval_rows))
            sections["data"] = {"eval": str(tmp_path / "eval.jsonl"), **sections.get("data", {})}  # null: for sets alone
        config = config_tree(tmp_path, rows, **sections)
        run = await make_run(redis, run_id, config, **(files or {}))
        async with AsyncExitStack() as life:
            world = World(run, config, redis_url)
            for i, kind in enumerate(replicas or [FAST]):
                world.replicas.append(await life.enter_async_context(simulated_replica(run, f"r{i}", **kind)))
            if reward_server:
                await life.enter_async_context(serve(config.reward.model_copy(update={"start_timeout": 600.0}), run=run))
            world.learner = await life.enter_async_context(idle_learner(run, world.replicas))
            world.policies = {0: world.replicas[0].engine.policy}
            await run.set_state(RunState.RUNNING)
            yield world

    return world


class World:
    def __init__(self, run, config, redis_url):
        self.run, self.config, self.redis_url = run, config, redis_url
        self.log, self.replicas = ExperienceLog(run), []

    async def train(self, upto=None):
        await self.learner.train(range(1, (upto or self.config.iterations) + 1), self.replicas)

    async def records(self, kind):
        return [record for _, record in await self.run.records("0", 0) if record["kind"] == kind]


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
                row = ROWS[row_of(5, group.index, len(ROWS))]
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


async def test_an_evaluation_with_several_answers_to_each_prompt(world):
    async with world(FAST, eval_rows=ROWS[:5], iterations=1, eval_samples=4, eval_answers=3) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        record = (await w.records("eval"))[0]
        lines = (w.config.run_dir / "samples" / "evaluation_0000.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        assert [(answer["row"], answer["answer"]) for answer in answers] == [divmod(place, 3) for place in range(12)]
        assert record["samples"] == 4 and len(record["examples"]) == 4
        assert {"mean@3", "best@3", "majority@3", "pass@1", "pass@2", "pass@3"} <= record.keys()
        assert record["pass@1"] == pytest.approx(record["accuracy"]) == record["mean@3"]
        assert record["pass@3"] == record["best@3"] >= record["pass@2"] >= record["pass@1"]
        assert len({answer["response"] for answer in answers}) > 4  # sampled: not one answer per prompt


SETS = [
    {"name": "easy", "data": "eval.jsonl", "samples": 3},
    {"name": "hard", "data": "eval.jsonl", "samples": 2, "answers": 4, "temperature": 0.7},
]


@pytest.mark.parametrize(
    ("beside", "best", "decides"),
    [
        (False, None, "easy/accuracy"),
        (True, None, None),
        (True, "hard/pass@2", "hard/pass@2"),
        (False, "hard/reward/exact", None),
    ],
)
async def test_sets_have_metrics_of_their_own_and_one_decides(world, tmp_path, beside, best, decides):
    sets = [{**each, "data": str(tmp_path / "eval.jsonl")} for each in SETS]
    own = {} if beside else {"data": {"eval": None}}
    async with world(FAST, eval_rows=ROWS[:5], iterations=1, eval_samples=2, eval_sets=sets, eval_best=best, **own) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        record = (await w.records("eval"))[0]
        lines = (w.config.run_dir / "samples" / "evaluation_0000.jsonl").read_text().splitlines()
        answers = [json.loads(line) for line in lines]
        rows = [(None, 0), (None, 1)] * beside
        rows += [("easy", row) for row in range(3)] + [("hard", row) for row in range(2) for _ in range(4)]
        assert [answer.get("set") for answer in answers] == [name for name, _ in rows]
        first = {name: 2 * beside + 3 * (name == "hard") if name else 0 for name, _ in rows}
        assert [answer["row"] for answer in answers] == [first[name] + row for name, row in rows]
        assert record["samples"] == 5 + 2 * beside
        for name in ("easy", "hard"):
            scores = [answer["score"] for answer in answers if answer.get("set") == name]
            assert record[f"{name}/accuracy"] == record[f"{name}/reward/exact"] == pytest.approx(sum(scores) / len(scores))
        assert {"hard/mean@4", "hard/best@4", "hard/majority@4", "hard/pass@1", "hard/pass@4"} <= record.keys()
        assert ("accuracy" in record) is beside and bool(record["parts"]) is beside
        assert record["held_out"]
        metric, value = evaluation_of(record)
        assert metric == (decides or best or "accuracy")
        assert value == record[metric]


async def test_a_deciding_metric_that_is_not_there_fails_the_evaluation(world, tmp_path):
    """pass@k is only there for right and wrong answers; this reward is neither."""
    sets = [{"name": "hard", "data": str(tmp_path / "eval.jsonl"), "answers": 2}]
    own = {"data": {"eval": None}}
    async with world(plugin=True, eval_rows=ROWS[:2], iterations=1, eval_sets=sets, eval_best="hard/pass@2", **own) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        assert not await w.records("eval")
        failed = await w.records("eval_failed")
        assert "hard/score" in failed[0]["text"]


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


async def test_overlong_prompts_are_filtered_counted_and_said(world):
    rows = [*ROWS, {"prompt": "1" * 40, "answer": "x"}]
    async with world(rows=rows, iterations=1) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        assert any("25 training prompts, 1 filtered as too long" in record["text"] for record in await w.records("notice"))


@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"rows": [*ROWS, {"prompt": "1" * 40}], "data": {"overlong": "error"}}, DataError, "train.jsonl:26"),
        ({"files": {"chat_template": CHAT_TEMPLATE.partition("{% if add")[0]}}, ConfigError, "add_generation_prompt"),
        ({"rows": [{"question": "1"}]}, DataError, "a column 'prompt'"),
    ],
)
async def test_what_cannot_be_prepared_fails_the_run_with_its_reason(world, sections, error, text):
    async with world(**sections) as w:
        with pytest.raises(error, match=text):
            await orchestrate(w.run)
        state, reason = await w.run.state()
        assert state is RunState.FAILED and text in reason


async def test_no_replica_in_time(world):
    async with world({"api": 7}, rollout={"start_timeout": 0.3}) as w:
        with pytest.raises(
            UnavailableError, match=r"1 rollout server within rollout.start_timeout = 0.3 s; found 0: r0 \(API 7, ours is 1\)"
        ):
            await orchestrate(w.run)
        assert (await w.run.state())[0] is RunState.FAILED
        assert ["r0" in record["text"] and "expected API 1, found 7" in record["text"] for record in await w.records("notice")][
            -1
        ]


async def test_no_reward_server_in_time(world):
    async with world(reward_server=False, reward={"start_timeout": 0.3}) as w:
        with pytest.raises(
            UnavailableError, match=r"1 reward server within reward.start_timeout = 0.3 s; found 0\. .*polyreme reward"
        ):
            await orchestrate(w.run)


@pytest.mark.parametrize("sections", [{}, {"groups_per_iteration": 1, "max_attempts": 1}])
async def test_a_reward_that_fails_every_sample_from_the_start_ends_the_run(world, sections):
    """Not after an outage's grace, which is longer than the test may take."""
    bad = [{**row, "answer": "bad"} for row in ROWS]
    async with world(
        rows=bad, plugin=True, reward={"start_timeout": 1000.0, "attempts": 1}, max_failed_fraction=1.0, **sections
    ) as w:
        with pytest.raises(RunFailedError) as caught:
            await orchestrate(w.run)
        assert f"first {2 if sections else 4} groups" in caught.value.found
        state, reason = await w.run.state()
        assert state is RunState.FAILED and "cannot score this" in reason


async def test_a_reward_that_always_raises_later_fails_the_run(world):
    """Something was scored before, so it may be an outage: the groups fail after its grace."""
    good, sections = ROWS[row_of(0, 0, len(ROWS))], {"start_timeout": 1.0, "attempts": 1}
    bad = [row if row == good else {**row, "answer": "bad"} for row in ROWS]
    async with world(rows=bad, plugin=True, reward=sections, max_attempts=1, max_failed_fraction=0.05) as w:
        with pytest.raises(RunFailedError, match=r"\d% failed, the last one because 3 of 3 samples .*cannot score this"):
            await orchestrate(w.run)
        state, reason = await w.run.state()
        assert state is RunState.FAILED and "cannot score this" in reason


async def test_a_bad_row_costs_its_group_only(world):
    rows = [{**row, "answer": "bad"} if i == 3 else row for i, row in enumerate(ROWS)]
    async with world(
        rows=rows, plugin=True, iterations=6, reward={"start_timeout": 1.0, "attempts": 1}, max_attempts=2, max_failed_fraction=0.1
    ) as w:  # fmt: skip
        await asyncio.gather(orchestrate(w.run), w.train())
        audit = await w.log.audit()
        assert audit.clean
        failed = [record["text"] for record in await w.records("notice") if "failed after 2 attempts" in record["text"]]
        assert len(failed) == 1 and "cannot score this" in failed[0]
        assert all(len(groups) == 4 for groups in w.learner.trained.values())
        assert "bad" not in {group.label for groups in w.learner.trained.values() for group in groups}


async def test_many_failed_groups_are_told_as_counts(world):
    rows = [{**row, "answer": "bad"} if i % 2 else row for i, row in enumerate(ROWS)]
    async with world(
        rows=rows, plugin=True, iterations=5, reward={"start_timeout": 1.0, "attempts": 1}, max_attempts=1, max_failed_fraction=1.0
    ) as w:  # fmt: skip
        await asyncio.gather(orchestrate(w.run), w.train())
        failed = (await w.log.audit()).counts["failed"]
        told = [record["text"] for record in await w.records("notice") if "failed after 1 attempts" in record["text"]]
        assert failed >= 8
        assert len(told) == 4 + len([n for n in (8, 16, 32, 64) if n <= failed])
        assert "8 groups have failed so far" in told[4] and "so far" not in told[3]


async def test_an_evaluation_that_cannot_be_scored_is_told_and_training_goes_on(world):
    bad = [{**row, "answer": "bad"} for row in ROWS[:3]]
    async with world(
        eval_rows=bad, plugin=True, iterations=1, reward={"start_timeout": 1.0, "attempts": 1}
    ) as w:  # fmt: skip
        await asyncio.gather(orchestrate(w.run), w.train())
        assert sorted(w.learner.trained) == [1] and not await w.records("eval")
        failed = await w.records("eval_failed")
        assert [record["version"] for record in failed] == [0, 1]
        assert all("cannot score this" in record["text"] for record in failed)


async def test_a_replica_that_dies_midrun_is_survived(world):
    async with world({**FAST, "failures": Failures(die_after=40)}, FAST, iterations=3) as w:
        await asyncio.gather(orchestrate(w.run), self_healing(w))
        assert (await w.log.audit()).clean and len(w.learner.trained) == 3
        assert w.replicas[0].engine.dead


async def self_healing(w):
    """Pushes go to the living replica only, as the publisher's would."""
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
    """A run starts when all that it wants are there; once it runs, one of them is enough."""
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
    """A replica that goes silent holds a group; the learner's plan lets the attempt expire, and the next one runs elsewhere."""
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
        groups = [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Orchestrator._make_group"]
        groups[0].cancel()  # a task group does not mind
        await asyncio.wait_for(asyncio.gather(working, w.train()), 300)
        assert (await w.log.audit()).clean
        assert {group.attempt for group in w.learner.trained[1]} == {1}
        calls = [call.request_id.rpartition("-")[0] for call in w.replicas[0].calls]
        assert len(calls) == 5 and len(set(calls)) == 4, "one of them alone was generated again"


async def test_an_evaluation_and_groups_survive_the_drain_of_their_reward_server(world, tmp_path):
    """Answers come once the next server is there: of version 0's evaluation, the group, and version 1's evaluation."""
    marks, gates = tmp_path / "marks", [tmp_path / "first", tmp_path / "second"]
    marks.touch()
    (tmp_path / "gated.py").write_text(
        f"import pathlib, time\nfirst, second = {str(gates[0])!r}, {str(gates[1])!r}\n\n"
        "def reward(response, **rest):\n"
        f"    marks = open({str(marks)!r}, 'a+')\n    print(file=marks, flush=True)\n    marks.seek(0)\n"
        "    gate = pathlib.Path(first if len(marks.read()) <= 4 else second)\n"
        "    while not gate.exists():\n        time.sleep(0.01)\n    return 1.0\n"
    )
    rewards = {"rewards": [{"file": str(tmp_path / "gated.py")}], "item_timeout": 60.0}
    async with world(
        reward_server=False, reward=rewards, eval_rows=ROWS[:4], eval_samples=4, iterations=1, groups_per_iteration=1
    ) as w, AsyncExitStack() as last:  # fmt: skip
        working, draining, servers = asyncio.create_task(orchestrate(w.run)), [], AsyncExitStack()
        await servers.enter_async_context(serve(w.config.reward, run=w.run))
        training = asyncio.create_task(w.train())
        for asked, gate in zip((1, 5), gates, strict=True):
            await until(lambda asked=asked: len(marks.read_text()) >= asked or working.done())
            assert not working.done()
            draining.append(asyncio.create_task(servers.aclose()))
            servers = AsyncExitStack()
            await servers.enter_async_context(serve(w.config.reward, run=w.run))
            gate.touch()
        last.push_async_callback(servers.aclose)
        await asyncio.wait_for(asyncio.gather(working, training, *draining), 300)
        assert (await w.log.audit()).clean
        assert [record["version"] for record in await w.records("eval")] == [0, 1]
        assert not await w.records("eval_failed")
        assert len(marks.read_text()) == 4 + 3 + 4, "each answer was scored once"


async def test_a_reward_outage_pauses_admission_and_burns_nothing(world):
    async with world(reward_server=False, iterations=3) as w, AsyncExitStack() as first:
        await first.enter_async_context(serve(w.config.reward, run=w.run))
        working = asyncio.create_task(orchestrate(w.run))
        await w.train(1)
        await first.aclose()
        training = asyncio.create_task(w.train())

        async def told():
            return any("no sample gets a score" in record["text"] for record in await w.records("notice"))

        await until(told)
        assert not working.done() and len(await w.log.in_flight()) <= 4
        async with serve(w.config.reward, run=w.run):
            await asyncio.gather(working, training)
        audit = await w.log.audit()
        assert audit.clean and audit.counts["failed"] == 0
        assert {group.attempt for groups in w.learner.trained.values() for group in groups} == {1}


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
    """Two replicas of different speed, weights swapped under way: nothing is thrown away, nothing is older than allowed."""
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


async def test_an_evaluation_that_replicas_run_away_from_is_told(world):
    """This learner holds nothing back."""
    slow = {"step_seconds": 0.002, "lengths": Lengths(40)}
    async with world(slow, eval_rows=ROWS, iterations=6, max_staleness=3, eval_interval=1) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        failed = await w.records("eval_failed")
        evaluated = [record["version"] for record in await w.records("eval")]
        assert failed and {0, 6} <= set(evaluated)
        assert sorted([*evaluated, *(record["version"] for record in failed)]) == list(range(7))
        assert await w.log.evaluated() == 6
        assert (await w.log.audit()).clean
