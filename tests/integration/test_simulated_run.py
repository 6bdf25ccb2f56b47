"""The simulated learner and replicas as processes, in a run whose other parts are real."""

from pathlib import Path

from polyreme.log.ledger import ExperienceLog
from polyreme_trainer.learner.simulated import LAYOUT, after_plan, newest
from support.simulated_run import simulated_run


async def test_it_trains_every_planned_group_once_and_in_order(redis_url: str, run_id: str, tmp_path: Path) -> None:
    async with simulated_run(redis_url, run_id, tmp_path, iterations=4, trainer={"save_interval": 2}) as started:
        state, reason = await started.ended(60)
        assert (state, reason) == ("done", ""), started.logs()
        log = ExperienceLog(started.run)
        assert (await log.audit()).clean
        plans = b"\0" * 32
        for iteration in range(1, 5):
            plan = await log.find_plan(iteration)
            assert plan is not None
            plans = after_plan(plans, plan)
        last = newest(tmp_path / "run" / "checkpoints")
        assert last is not None
        assert (last.version, last.plans) == (4, plans)
        assert [record["iteration"] for record in await started.records("iteration")] == [1, 2, 3, 4]
        assert len(bytes.fromhex((await started.records("iteration"))[-1]["weights"])) == LAYOUT.nbytes
