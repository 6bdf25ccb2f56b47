"""Presets that change sampling: replacement of groups without variance, and an additional greedy sample."""

import json
from pathlib import Path

from polyreme.experience.ledger import ExperienceLog
from polyreme_trainer.orchestrator.prompts.prompt_filter import REFILL
from support.simulated_run import simulated_run


async def test_dynamic_sampling_drops_groups_of_equal_scores_within_its_bound(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    (tmp_path / "constant.py").write_text("def reward(response):\n    return 0.5\n")
    reward = {"rewards": [{"file": str(tmp_path / "constant.py")}]}
    async with simulated_run(redis_url, run_id, tmp_path, iterations=2, algorithm={"preset": "dapo"}, reward=reward) as started:
        assert await started.ended(300) == ("done", ""), started.logs()
        records = {record["iteration"]: record for record in await started.records("rollout")}
        assert {number: record["rollout/dropped_groups"] for number, record in records.items()} == {1: 4 * REFILL, 2: 4 * REFILL}
        assert records[1]["rollout/mean_score"] == 0.5
        audit = await ExperienceLog(started.run).audit()
        assert audit.clean


async def test_remax_has_a_greedy_sample_in_every_group(redis_url: str, run_id: str, tmp_path: Path) -> None:
    async with simulated_run(redis_url, run_id, tmp_path, iterations=1, algorithm={"preset": "remax"}) as started:
        assert await started.ended(300) == ("done", ""), started.logs()
    lines = (tmp_path / "run" / "samples" / "iteration_0001.jsonl").read_text().splitlines()
    groups = [json.loads(line)["group"] for line in lines]
    assert sorted(groups) == sorted([0, 1, 2, 3] * (3 + 1))
