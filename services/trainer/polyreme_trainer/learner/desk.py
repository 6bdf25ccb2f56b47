"""What rank 0 alone does: the run record, the experience log, and waiting on replicas. Lives on rank 0's event loop.

Every wait here ends when the run drains or fails: DrainError is no failure, it asks the ranks to save and leave.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from polyreme.config import RunConfig
from polyreme.errors import PolyremeError, UnavailableError
from polyreme.log.ledger import ExperienceLog, Role, Term
from polyreme.log.run import Run, RunState
from polyreme.log.store import RIDE_OVER, connect
from polyreme.registry import Registry
from polyreme_trainer.data import load_prompts
from polyreme_trainer.learner import gates
from polyreme_trainer.learner.fleet import Commit
from polyreme_trainer.learner.publish import Publisher
from polyreme_trainer.template import Template

ATTACH_SECONDS = 60.0
STATE_SECONDS = 0.5

T = TypeVar("T")


class DrainError(PolyremeError):
    """The run was asked to stop while this rank waited; there is nothing left to wait for."""

    exit_code = 0

    def __init__(self, waiting_for: str) -> None:
        super().__init__(waiting_for, "the run draining", "Go on later with --resume.")


class Desk:
    """Rank 0's connection to the run, as the run's one learner. Make it with `open`."""

    def __init__(self, run: Run, experience: ExperienceLog, term: Term) -> None:
        self.run, self.experience, self.term = run, experience, term
        self.registry = Registry(run)

    @classmethod
    async def open(cls, redis_url: str, run_id: str) -> "Desk":
        """Connects and takes the learner's role over."""
        run = await Run.attach(await connect(redis_url, RIDE_OVER), run_id, ATTACH_SECONDS)
        experience = ExperienceLog(run)
        return cls(run, experience, await experience.take(Role.LEARNER))

    async def close(self) -> None:
        await self.run.redis.aclose()

    async def draining(self) -> bool:
        """Whether the run was asked to stop. Raises RunFailedError when it has failed."""
        return await self.run.check() in (RunState.DRAINING, RunState.DONE)

    async def heed(self, work: Awaitable[T], what: str) -> T:
        """Awaits `work`, which has a deadline of its own, and watches the run meanwhile.

        Raises:
            DrainError: the run was asked to stop first. RunFailedError: it failed first.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=STATE_SECONDS))[0]:
                if await self.draining():
                    raise DrainError(what)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def groups(self, iteration: int, straggler_seconds: float) -> list[bytes]:
        """The payloads that iteration `iteration` trains on; none when the run drains."""
        if await self.draining():
            return []
        plan = await self.experience.wait_plan(iteration, straggler_seconds)
        if plan is None:
            await self.run.check()
            return []
        return await self.experience.read(plan)

    async def progress(self, record: dict[str, Any]) -> None:
        """Emits a record between two steps, where a draining run can be left."""
        await self.run.emit(record)
        if await self.draining():
            raise DrainError("the warm start to end")

    async def gate(self, gate: gates.Gate) -> None:
        """Records a gate's outcome. Raises GateError when it was not passed."""
        await self.run.emit(gate.record())
        gate.check()

    async def running(self) -> None:
        """Everything that must agree does: lets the run begin, or go on."""
        if await self.run.check() is RunState.STARTING:
            await self.run.set_state(RunState.RUNNING)

    async def committed(self, publisher: Publisher, version: int, config: RunConfig) -> list[Commit]:
        """The commits of the replicas that serve `version`, once they are as many as the run wants; one, when it has started already.

        Raises:
            UnavailableError, DrainError, RunFailedError
        """
        seconds = config.rollout.start_timeout + (config.eval_hold if config.holds_versions else 0.0)
        replicas = config.rollout.replicas if await self.run.check() is RunState.STARTING else 1
        wait = publisher.wait_committed(version, replicas, seconds)
        return await self.heed(wait, f"replicas at version {version}")

    async def replica_answers(
        self, config: RunConfig, version: int, replicas: Sequence[Commit]
    ) -> tuple[list[gates.Answer], list[gates.Answer]]:
        """Greedy and sampled answers of these replicas to a few training prompts.

        Raises:
            UnavailableError: none of them holds a lease any more.
        """
        template = Template(await self.run.model_files(), config.data)
        prompts = _spread(load_prompts(config.data.train, config.data, template).prompts, gates.PROMPTS)
        names = {commit.replica for commit in replicas}
        leases = [lease for lease in await self.registry.leases("rollout") if lease.id in names]
        if not leases:
            raise UnavailableError("a rollout replica to compare with", "none with a lease", "See the replicas' logs.")
        max_new = min(gates.NEW_TOKENS, config.rollout.max_new_tokens)

        async def ask(address: str, ids: np.ndarray, temperature: float, samples: int) -> list[gates.Answer]:
            return await gates.ask_replica(
                address, self.run.run_id, ids, template.stop_ids, temperature, samples, max_new, version, config.security
            )

        calls = [(lease.address, prompt.ids.astype(np.int64)) for lease in leases for prompt in prompts]
        greedy = await asyncio.gather(*(ask(address, ids, 0.0, 1) for address, ids in calls))
        sampled = await asyncio.gather(*(ask(address, ids, config.rollout.temperature, gates.SAMPLES) for address, ids in calls))
        return [a for answers in greedy for a in answers], [a for answers in sampled for a in answers]


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of them, evenly spaced."""
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]
