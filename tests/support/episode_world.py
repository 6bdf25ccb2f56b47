"""Episodes over simulated replicas with real gRPC: a run, its pool, and groups that an environment plays."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.record_checks import check_group
from polyreme.experience.record_codec import decode_group, encode_group
from polyreme.experience.records import GroupRecord
from polyreme.experience.run import Run, RunState
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.episodes import Episodes, Host
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.session import Bounds
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import ReplicaSampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.scoring.scoring import Scoring
from support.simulated import ROWS, IdleLearner, Replica, config_tree, idle_learner, make_run, simulated_replica
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files

WIDE = Bounds(turns=8, tokens=128, seconds=3600.0)


class EpisodeWorld:
    """A run at version 0 with its replicas, and the prompts of its rows."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        replicas: list[Replica],
        learner: IdleLearner | None,
        pool: ReplicaPool,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.run, self.config, self.replicas, self.pool = run, config, replicas, pool
        self.learner = learner
        self.template = Template(files or model_files(), config.data)
        self.sampler = ReplicaSampler(run.run_id, config, self.template, pool)
        self.log = ExperienceLog(run)
        self.prompts = load_prompts(config.data.train, config.data, self.template).prompts

    async def admit(self) -> Task:
        """The first attempt at a group with the first prompt."""
        await self.log.take(Writer.ORCHESTRATOR)
        (admission,) = await self.log.admit(1)
        return Task(admission, self.prompts[0])

    async def play(
        self,
        host: Host,
        task: Task | None = None,
        bounds: Bounds = WIDE,
        partial_log: PartialRolloutLog | None = None,
        tries: int = 2,
        budget: TokenBudget | None = None,
    ) -> GroupRecord:
        """The group of a task, as a reader of the log gets it."""
        task = task or await self.admit()
        saving, unscored = partial_log or PartialRolloutLog(self.log), Scoring(None, None)
        episodes = Episodes(self.sampler, Tail(self.template), host, saving, bounds, tries, unscored, budget)
        played = await episodes.play(task)
        admission = task.admission
        group = GroupRecord(admission.index, admission.attempt, task.prompt.ids, played.samples, episodes=played.episodes)
        check_group(group)
        return decode_group(encode_group(group))


@asynccontextmanager
async def episode_world(
    redis: Redis, run_id: str, folder: Path, *engines: dict[str, Any], chat_template: str = CHAT_TEMPLATE, **sections: Any
) -> AsyncIterator[EpisodeWorld]:
    """Args: engines: the arguments of each replica's engine. sections: see `config_tree`."""
    config = config_tree(folder, ROWS, **sections)
    run = await make_run(redis, run_id, config, chat_template=chat_template)
    async with AsyncExitStack() as life:
        replicas = [
            await life.enter_async_context(simulated_replica(run, f"r{place}", **engine)) for place, engine in enumerate(engines)
        ]
        learner = await life.enter_async_context(idle_learner(run, replicas))
        await run.set_state(RunState.RUNNING)
        pool = ReplicaPool(run, ExperienceLog(run), start_timeout=600.0, capacity=12)
        life.push_async_callback(pool.close)
        await pool.refresh()
        yield EpisodeWorld(run, config, replicas, learner, pool)
