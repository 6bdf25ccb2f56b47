"""A run that cannot be prepared, and a run whose rewards fail."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from polyreme.errors import ConfigError, DataError, RunFailedError, UnavailableError
from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_trainer.orchestrator.main import orchestrate
from polyreme_trainer.orchestrator.prompts.prompt_order import PromptOrder
from support.simulated import ROWS
from support.tiny_tokenizer import CHAT_TEMPLATE
from support.waiting import until


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
        with pytest.raises(UnavailableError, match=r"rollout\.start_timeout = 0.3 s.*r0 \(API 7, ours is 1\)"):
            await orchestrate(w.run)
        assert (await w.run.state())[0] is RunState.FAILED
        assert ["r0" in record["text"] and "expected API 1, found 7" in record["text"] for record in await w.records("notice")][
            -1
        ]


async def test_no_reward_server_in_time(world):
    async with world(reward_server=False, reward={"start_timeout": 0.3}) as w:
        with pytest.raises(UnavailableError, match=r"reward\.start_timeout = 0.3 s.*polyreme reward"):
            await orchestrate(w.run)


@pytest.mark.parametrize("sections", [{}, {"groups_per_iteration": 1, "max_attempts": 1}])
async def test_a_reward_that_fails_every_sample_from_the_start_ends_the_run(world, sections):
    """It ends before the time for an outage, which is longer than the test may take."""
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
    """A group was scored before, so this may be an outage, and the groups fail after its timeout."""
    good, sections = ROWS[PromptOrder(0, [len(ROWS)]).row_of(0)], {"start_timeout": 1.0, "attempts": 1}
    bad = [row if row == good else {**row, "answer": "bad"} for row in ROWS]
    async with world(rows=bad, plugin=True, reward=sections, max_attempts=1, max_failed_fraction=0.05) as w:
        with pytest.raises(RunFailedError, match=r"\d% failed.*cannot score this"):
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


async def test_many_failed_groups_are_reported_as_counts(world):
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


async def test_an_evaluation_and_groups_survive_the_drain_of_their_reward_server(world, tmp_path):
    """Scores arrive from the next server: for version 0's evaluation, the group, and version 1's evaluation."""
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
