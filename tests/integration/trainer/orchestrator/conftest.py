"""A run with its services for the tests of the orchestrator: real Redis, gRPC, rewards and pushes; simulated replicas."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths
from support.simulated import ROWS, config_tree, idle_learner, make_run, simulated_replica

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
            sections["data"] = {"eval": str(tmp_path / "eval.jsonl"), **sections.get("data", {})}  # null: for named sets only
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
