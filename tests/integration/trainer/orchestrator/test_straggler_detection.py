"""A run with a silent and with a slow replica."""

import asyncio

import pytest

from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_rollout.testing.simulated_engine import Failures, Lengths
from polyreme_trainer.orchestrator.main import orchestrate
from polyreme_trainer.orchestrator.replicas import straggler_detection
from support.simulated import ROWS, config_tree, idle_learner, make_run, simulated_replica


@pytest.mark.parametrize(
    "kind", [{"failures": Failures(silent_after=500)}, {"step_seconds": 0.2}], ids=["silent", "slow"]
)  # fmt: skip
async def test_a_laggard_holds_nobody(redis, run_id, tmp_path, monkeypatch, kind) -> None:
    """It keeps its lease, and its calls have long deadlines, but the run continues without it."""
    monkeypatch.setattr(straggler_detection, "SILENCE_TIMEOUT", 2.0)
    monkeypatch.setattr(straggler_detection, "WINDOW_SECONDS", 2.0)
    sections = {"rollout": {"chunk_timeout": 3600.0}, "iterations": 4}
    run = await make_run(redis, run_id, config_tree(tmp_path, ROWS, **sections))
    usual = {"step_seconds": 0.004, "lengths": Lengths(60)}
    async with (
        simulated_replica(run, "good", **usual) as good,
        simulated_replica(run, "better", **usual) as better,
        simulated_replica(run, "bad", **{**usual, **kind}) as bad,
        serve((await run.config()).reward, run=run),
        idle_learner(run, [good, better, bad]) as learner,
    ):
        await run.set_state(RunState.RUNNING)
        await asyncio.gather(orchestrate(run), learner.train(range(1, 5), [good, better, bad]))
        told = [record["text"] for _, record in await run.records("0", 0) if "suspended" in record.get("text", "")]
        assert told and all(text.startswith("replica bad is suspended for") for text in told)
        assert (await learner.log.audit()).clean
        assert {group.attempt for groups in learner.trained.values() for group in groups} == {1}
