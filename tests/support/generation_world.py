"""Generation of one prompt's samples over simulated replicas with real gRPC."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from redis.asyncio import Redis

from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme_trainer.orchestrator.generation.generate import Generation, generate
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from support.simulated import ROWS, Replica, config_tree, idle_learner, make_run, simulated_replica
from support.waiting import until

PROMPT = np.array([7, 8, 9], dtype=np.int32)


class GenerationWorld:
    """A run with a pool that sees the replicas that `start` adds, at version 0, and their learner."""

    def __init__(self, run: Run, life: AsyncExitStack, **pool: Any) -> None:
        given: dict[str, Any] = {"start_timeout": 600.0, "capacity": 12, **pool}
        self.run, self.pool = run, ReplicaPool(run, ExperienceLog(run), **given)
        self._life = life

    async def start(self, *engines: dict[str, Any]) -> list[Replica]:
        """Starts a replica for each of the engines, given by their arguments."""
        self.replicas = [
            await self._life.enter_async_context(simulated_replica(self.run, f"r{i}", **engine))
            for i, engine in enumerate(engines)
        ]
        self.learner = await self._life.enter_async_context(idle_learner(self.run, self.replicas))
        await self.pool.refresh()
        self._life.push_async_callback(self.pool.close)
        return self.replicas

    def wanted(self, **fields: Any) -> Generation:
        defaults: dict[str, Any] = dict(
            run_id=self.run.run_id, name="g", prompt_ids=PROMPT, count=4, max_new=96, temperature=1.0, stop_ids=(1,),
            seed=lambda slot, prefix: 1000 * slot + prefix, min_version=0,
        )  # fmt: skip
        return Generation(**{**defaults, **fields})

    async def generate(self, **fields: Any) -> Any:
        return await generate(self.pool, self.wanted(**fields), chunk_timeout=3600.0, progress_timeout=3600.0)

    async def a_chunk_came(self) -> None:
        await until(lambda: any(claim._chunk_at for claim in self.pool._claims))


@asynccontextmanager
async def generation_world(redis: Redis, run_id: str, folder: Path, **pool: Any) -> AsyncIterator[GenerationWorld]:
    """`pool`: arguments of its ReplicaPool."""
    run = await make_run(redis, run_id, config_tree(folder, ROWS))
    async with AsyncExitStack() as life:
        yield GenerationWorld(run, life, **pool)
