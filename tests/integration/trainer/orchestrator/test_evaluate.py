"""Evaluations of a run: their policy version, their records, and the effect of failures."""

import asyncio
import json

import pytest

from polyreme.rundir.evaluations import evaluation_of
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.main import orchestrate
from support.record_lines import read_evaluation
from support.simulated import ROWS

FAST = {"lengths": Lengths(20, spread=0.5)}


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
        metric, value = evaluation_of(read_evaluation(record))
        assert metric == (decides or best or "accuracy")
        assert value == record[metric]


async def test_a_deciding_metric_that_is_not_there_fails_the_evaluation(world, tmp_path):
    """pass@k exists only for right and wrong answers, but this reward has other values."""
    sets = [{"name": "hard", "data": str(tmp_path / "eval.jsonl"), "answers": 2}]
    own = {"data": {"eval": None}}
    async with world(plugin=True, eval_rows=ROWS[:2], iterations=1, eval_sets=sets, eval_best="hard/pass@2", **own) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        assert not await w.records("eval")
        failed = await w.records("eval_failed")
        assert "hard/score" in failed[0]["text"]


async def test_an_evaluation_that_cannot_be_scored_is_reported_and_training_continues(world):
    bad = [{**row, "answer": "bad"} for row in ROWS[:3]]
    async with world(
        eval_rows=bad, plugin=True, iterations=1, reward={"start_timeout": 1.0, "attempts": 1}
    ) as w:  # fmt: skip
        await asyncio.gather(orchestrate(w.run), w.train())
        assert sorted(w.learner.trained) == [1] and not await w.records("eval")
        failed = await w.records("eval_failed")
        assert [record["version"] for record in failed] == [0, 1]
        assert all("cannot score this" in record["text"] for record in failed)


async def test_an_evaluation_whose_version_the_replicas_leave_is_reported(world):
    """This learner does not hold versions."""
    slow = {"step_seconds": 0.002, "lengths": Lengths(40)}
    async with world(slow, eval_rows=ROWS, iterations=6, max_staleness=3, eval_interval=1) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        failed = await w.records("eval_failed")
        evaluated = [record["version"] for record in await w.records("eval")]
        assert failed and {0, 6} <= set(evaluated)
        assert sorted([*evaluated, *(record["version"] for record in failed)]) == list(range(7))
        assert await w.log.evaluated() == 6
        assert (await w.log.audit()).clean
