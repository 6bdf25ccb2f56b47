"""One replica, an environment server in a process of its own, and the orchestrator's episodes there."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import Admission, ExperienceLog, Writer
from polyreme.experience.records import SampleRecord
from polyreme.experience.run import Run, RunState
from polyreme.process.lifecycle import Child
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.episodes import Episodes
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.session import Bounds
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import ReplicaSampler
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.scoring.scoring import Scoring
from support.replicas import Learner, Replica, hf_weights, model_files, replica

RUN_ID = "bench-episodes"
TURNS, TOKENS, CONTEXT, SEQS = 4, 32, 512, 64
GROUP, GROUPS = 8, 8
TOOL_SECONDS = 2.0
TALK = """
import asyncio, time
class Talk:
    def reset(self, row, seed):
        self.said, self.seconds = 0, float(row["answer"])
    def step(self, message):
        self.said += 1
        return "go on, say more", 0.0, self.said == %d
class Threads(Talk):
    def step(self, message):
        time.sleep(self.seconds)
        return super().step(message)
class Coroutines(Talk):
    async def reset(self, row, seed):
        super().reset(row, seed)
    async def step(self, message):
        await asyncio.sleep(self.seconds)
        return super().step(message)
"""


def configured(folder: Path, model: Path, environment: dict[str, Any]) -> RunConfig:
    rows = [
        {"prompt": f"say something {number}", "answer": str(seconds)}
        for seconds in (0.0, TOOL_SECONDS)
        for number in range(GROUPS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"max_new_tokens": TOKENS, "max_model_len": CONTEXT, "max_num_seqs": SEQS, "vllm": {"kv_cache_mib": 512}}
    tree = {
        "name": "episodes",
        "iterations": 1,
        "groups_per_iteration": GROUPS,
        "group_size": GROUP,
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64},
        "rollout": rollout,
        "reward": None,
        "environment": {"episodes": 100_000, "max_seconds": 3600.0, **environment},
        "trainer": {"optimizer": {"lr": 1.0}},
    }
    return parse_config(tree, "the bench")


@asynccontextmanager
async def environment_process(url: str, run: Run, log: Path) -> AsyncIterator[tuple[Child, Lease]]:
    command = [sys.executable, "-m", "polyreme", "environment", "--redis", url, "--run", run.run_id]
    child = Child.spawn("environment", command, log_path=log)
    try:
        [lease] = await Registry(run).wait_for("environment", 1, 120, alive=lambda: child.poll() is None)
        yield child, lease
    finally:
        await child.stop(60)


@dataclass
class Side:
    """What the orchestrator has: a sampler over the replica, and episodes at one environment server."""

    sampler: ReplicaSampler
    episodes: Episodes
    tasks: list[Task]

    async def play(self, place: int) -> list[SampleRecord]:
        """A group's trajectories."""
        return (await self.episodes.play(self.tasks[place])).samples

    async def repeat(self, place: int, samples: Sequence[SampleRecord]) -> None:
        """The turns of a group once more, each as long as it was, behind the same messages, without sessions and environments."""
        task = self.tasks[place]

        async def repeat_one(sample: SampleRecord) -> None:
            context, end = task.prompt.ids if sample.prompt_ids is None else sample.prompt_ids, 0
            for turn in sample.turns:
                context = np.concatenate([context, sample.token_ids[end : turn.start]])
                wanted = self.sampler.of_group(task.admission, context)
                name, length = f"{wanted.name}-{id(sample)}-{turn.start}", turn.end - turn.start
                [answer] = await self.sampler.sample(replace(wanted, name=name, count=1, max_new=length, stop_ids=()))
                context, end = np.concatenate([context, answer.token_ids()]), turn.end

        await asyncio.gather(*(repeat_one(sample) for sample in samples))

    async def answer(self, place: int, tokens: int) -> None:
        """Single responses of so many tokens each."""
        task = self.tasks[place]
        wanted = replace(self.sampler.of_group(task.admission, task.prompt.ids), max_new=tokens, stop_ids=())
        await self.sampler.sample(wanted)


async def side_of(stack: AsyncExitStack, run: Run, config: RunConfig, model: Path, pool: ReplicaPool) -> Side:
    assert config.environment is not None
    template = Template(model_files(model), config.data)
    sampler = ReplicaSampler(RUN_ID, config, template, pool)
    client = EnvironmentClient(run, config.environment, config.data, 0)
    stack.push_async_callback(client.close)
    await client.refresh()
    bounds = Bounds(config.environment.max_turns, CONTEXT, 3600.0)
    log = PartialRolloutLog(ExperienceLog(run), interval=3600.0)
    prompts = load_prompts(config.data.train, config.data, template).prompts
    tasks = [Task(Admission(index, 1, 0), prompt) for index, prompt in enumerate(prompts)]
    return Side(sampler, Episodes(sampler, Tail(template), client, log, bounds, 3, Scoring(None, None)), tasks)


async def sampled_tokens(there: Replica) -> float:
    """Tokens that a replica has sampled."""
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as client:
        lines = (await client.get(f"http://{there.lease.http_address}/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("polyreme_rollout_tokens_total"))


class Stack:
    """A replica with a policy, and the environment servers beside it."""

    def __init__(self, exits: AsyncExitStack, folder: Path, model: Path, redis: str, replica: Replica, pool: ReplicaPool) -> None:
        self._exits, self._folder, self._model, self._redis = exits, folder, model, redis
        self.replica, self._pool = replica, pool

    async def side(self, name: str, environment: dict[str, Any]) -> tuple[Side, Child, Lease]:
        """Starts an environment server: of the class `name`, or of the agents at `url`."""
        of = environment if "url" in environment else {"file": str(self._folder / "talk.py"), "name": name, **environment}
        config = configured(self._folder, self._model, of)
        run = await Run.create(self.replica.run.redis, name, config, model_files(self._model))
        child, lease = await self._exits.enter_async_context(environment_process(self._redis, run, self._folder / f"{name}.log"))
        return await side_of(self._exits, run, config, self._model, self._pool), child, lease


async def open_stack(exits: AsyncExitStack, folder: Path, model: Path) -> Stack:
    """Starts Redis and a replica with the first version of the model."""
    (folder / "talk.py").write_text(TALK % TURNS)
    server = exits.enter_context(EmbeddedServer.start(folder / "redis"))
    config = configured(folder, model, {"file": str(folder / "talk.py"), "name": "Talk"})
    there = await exits.enter_async_context(replica(server.url, RUN_ID, model, folder / "replica.log", config))
    log = ExperienceLog(there.run)
    term = await log.take(Writer.LEARNER)
    await log.begin(0)
    learner = Learner.of(RUN_ID, model, term.counter)
    exits.callback(learner.arena.close)
    await learner.push(there.weights, 0, hf_weights(model))
    await log.ack_stage(there.lease.id, 0, term.counter)
    await log.ack_commit(there.lease.id, 0, term.counter, 0.0, 0.0)
    await there.run.set_state(RunState.RUNNING)
    pool = ReplicaPool(there.run, log, 600.0, SEQS)
    exits.push_async_callback(pool.close)
    await pool.refresh()
    return Stack(exits, folder, model, server.url, there, pool)
