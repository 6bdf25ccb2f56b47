"""Prompts that are always solved are mostly skipped. Groups count once, even after a kill of the orchestrator and in a fork."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from polyreme.experience.audit import LogSnapshot
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme.rundir.fork import copy_start
from polyreme.rundir.run_directory import EMBEDDED
from polyreme_trainer.orchestrator.prompts.prompt_order import PromptOrder, retry_draw
from support.processes import command_line
from support.simulated import ROWS
from support.simulated_run import SimulatedRun, simulated_run
from support.waiting import until

RETRY, GROUP = 0.25, 3
SKIP = {"preset": "raft", "skip_prompts": {"min_samples": GROUP, "retry": RETRY}}


def constant_reward(folder: Path) -> dict[str, object]:
    (folder / "constant.py").write_text("def reward(response):\n    return 1.0\n")
    return {"rewards": [{"file": str(folder / "constant.py")}]}


async def check_log(run: Run, before: int = 0) -> tuple[int, int]:
    """Every group in the log follows from the pass rates, and every scored one counts once. Returns sampled and skipped groups.

    Args:
        before: samples that the log took over from its parent.
    """
    log = await LogSnapshot.take(run)
    assert log.audit().clean
    skipped = {index for index, row in log.rows.items() if row[0] == "dropped"}
    assert all(log.rows[index][2:] == ["-", "always", "solved"] for index in skipped)
    assert all(retry_draw(0, index) >= RETRY for index in skipped)
    sampled = [index for index, row in log.rows.items() if row[0] in ("appended", "planned")]
    rates = await ExperienceLog(run).pass_rates()
    assert sum(rate.samples for rate in rates.values()) == before + GROUP * len(sampled)
    assert all(rate.solved == rate.streak == rate.samples for rate in rates.values())
    if not before:
        order = PromptOrder(0, [len(ROWS)])
        rows = Counter(order.row_of(index) for index in sampled)
        assert sorted(rate.samples for rate in rates.values()) == sorted(GROUP * count for count in rows.values())
    return len(sampled), len(skipped)


async def kill_children(started: SimulatedRun, iteration: int) -> None:
    """Kills orchestrator and learner once an iteration is recorded."""

    async def reached() -> bool:
        return any(record["iteration"] == iteration for record in await started.records("iteration"))

    await until(reached)
    children = psutil.Process(started.children["train"].pid).children()
    named = ("polyreme_trainer.orchestrator", "polyreme_trainer.testing.simulated_learner")
    writers = [child for child in children if set(named) & set(command_line(child))]
    assert len(writers) == 2
    for child in writers:
        child.kill()


async def test_always_solved_prompts_are_skipped_over_a_kill_and_in_a_fork(redis_url: str, run_id: str, tmp_path: Path) -> None:
    reward, passes = constant_reward(tmp_path), -(-len(ROWS) // 4)
    sections: dict[str, Any] = {"algorithm": SKIP, "reward": reward, "iterations": passes + 4}
    async with simulated_run(redis_url, run_id, tmp_path, **sections) as started:
        await kill_children(started, passes + 1)
        assert await started.ended(300) == ("done", ""), started.logs()
        config = await started.run.config()
        sampled, skipped = await check_log(started.run)
        assert sampled == 4 * (passes + 4) and skipped > 0
        records = await started.records("rollout")
        assert (
            0 < sum(record["rollout/skipped_prompts"] for record in records) <= skipped
        )  # they do not include those of the killed process
        assert {record["rollout/pass_rate"] for record in records if "rollout/pass_rate" in record} == {1.0}
    parent = tmp_path / "run"
    (parent / "run.json").write_text(json.dumps({"run_id": run_id, "redis": EMBEDDED}))
    origin = copy_start(parent, config.model_copy(update={"name": "fork", "iterations": passes + 6}))
    fork = simulated_run(
        redis_url, f"{run_id}-fork", tmp_path, first_group=origin.group, name="fork", **{**sections, "iterations": passes + 6}
    )
    async with fork as started:
        assert await started.ended(300) == ("done", ""), started.logs()
        assert await check_log(started.run, before=GROUP * sampled) >= (8, 1)
