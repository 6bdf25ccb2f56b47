"""Rank 0's client of the run: its record, the experience log, and waits for replicas. It runs on rank 0's event loop.

Invariant: every wait ends when the run drains or fails. DrainError is not a failure: it makes the ranks save and exit.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError, UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog, Plan, Term, Writer
from polyreme.experience.listing import attached
from polyreme.experience.loading import REPORT_SECONDS, LoadReports, reports_to
from polyreme.experience.metric_records import MetricRecord, ServiceNotice
from polyreme.experience.pass_rates import PassRate
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme.process.tasks import end_all
from polyreme.rundir.checkpoint_manifest import CheckpointFacts
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner import gates
from polyreme_trainer.weight_sync.publisher import Publisher
from polyreme_trainer.weight_sync.replica_state import Commit

ATTACH_SECONDS = 60.0

Answers = list[gates.Answer]
T = TypeVar("T")


class DrainError(PolyremeError):
    """The run began to drain while this rank waited, so the wait cannot succeed."""

    exit_code = 0

    def __init__(self, waiting_for: str) -> None:
        super().__init__(waiting_for, "a run that drains", "Continue later with --resume.")


class RunClient:
    """Rank 0's connection to the run, as the run's only learner. Create it with `open`.

    Args:
        state_seconds: between two looks at the run, or at a replica's lease, while this waits.
        again_seconds: pause after all replicas were lost, since a dead one's lease expires a few seconds later.
    """

    def __init__(
        self, run: Run, experience: ExperienceLog, term: Term, state_seconds: float = 0.5, again_seconds: float = 1.0
    ) -> None:
        self.state_seconds, self.again_seconds = state_seconds, again_seconds
        self.run, self.experience, self.term = run, experience, term
        self.registry = Registry(run)

    @classmethod
    async def open(cls, redis_url: str, run_id: str) -> "RunClient":
        """Connects and takes over as the learner."""
        run = await Run.attach(await connect(redis_url, RECONNECT_TIMEOUT), run_id, ATTACH_SECONDS)
        experience = ExperienceLog(run)
        return cls(run, experience, await experience.take(Writer.LEARNER))

    async def close(self) -> None:
        await self.run.redis.aclose()

    async def begin(self, version: int, facts: CheckpointFacts) -> None:
        """Begins the log at `version`. A fork's log starts with the pass rates in its checkpoint's facts."""
        rates = {prompt: PassRate.parse(text) for prompt, text in facts.get("pass_rates", {}).items()}
        await self.experience.begin(version, rates)

    async def add_facts(self, facts: dict[str, object]) -> None:
        """Adds a checkpoint's facts about the log: this learner's term, and the pass rates for a fork."""
        rates = await self.experience.pass_rates()
        facts |= {"term": self.term.counter, "pass_rates": {prompt: str(rate) for prompt, rate in rates.items()}}

    async def draining(self) -> bool:
        """Whether the run was asked to stop. Raises RunFailedError when it has failed."""
        return await self.run.check() in (RunState.DRAINING, RunState.DONE)

    async def watch(self, work: Awaitable[T], what: str) -> T:
        """Awaits `work`, which has its own deadline, while it checks the run's state.

        Raises:
            DrainError: the run drains. RunFailedError: the run has failed.
        """

        async def check() -> None:
            if await self.draining():
                raise DrainError(what)

        return await self._watched(work, check)

    async def plan(self, iteration: int, straggler_seconds: float) -> tuple[Plan, list[bytes]] | None:
        """The plan of iteration `iteration` and its groups' payloads; None when the run drains."""
        if await self.draining():
            return None
        plan = await self.experience.wait_plan(iteration, straggler_seconds)
        if plan is None:
            await self.run.check()
            return None
        return plan, await self.experience.read(plan)

    async def progress(self, record: MetricRecord) -> bytes:
        """Emits a record between two steps. Returns one byte: 1 when the run drains, else 0."""
        await self.run.emit(record)
        return bytes([await self.draining()])

    async def check_gates(self, outcomes: Sequence[gates.Gate]) -> None:
        """Records the outcome of each gate. Raises GateError at the first that failed."""
        for gate in outcomes:
            await self.run.emit(gate.record())
            gate.check()

    async def running(self) -> None:
        """Sets the run's state to running, once all gates have passed."""
        if await self.run.check() is RunState.STARTING:
            await self.run.set_state(RunState.RUNNING)

    async def committed(self, publisher: Publisher, version: int, config: RunConfig) -> list[Commit]:
        """Waits for replicas that serve `version` and returns their commits: all of the run's at its start, later at least one.

        Raises:
            UnavailableError, DrainError, RunFailedError
        """
        return await self._committed(publisher, version, config, _commit_timeout(config))

    async def _committed(self, publisher: Publisher, version: int, config: RunConfig, seconds: float) -> list[Commit]:
        replicas = config.rollout.replicas if await self.run.check() is RunState.STARTING else 1
        wait = publisher.wait_committed(version, replicas, seconds)
        return await self.watch(wait, f"replicas at version {version}")

    async def replica_answers(self, publisher: Publisher, version: int, config: RunConfig) -> tuple[Answers, Answers]:
        """Greedy and sampled answers to a few training prompts from replicas that serve `version`. Waits for them as `committed`.

        Replicas that are lost during the call, or join later, are skipped. When all are lost, their successors are queried. The
        deadline of the whole call is that of `committed`.

        Raises:
            UnavailableError, DrainError, RunFailedError
        """
        deadline, lost = time.monotonic() + _commit_timeout(config), dict[str, str]()
        reading = asyncio.create_task(self._questions(config, version))  # while the replicas load the version
        try:
            while True:
                commits = await self._committed(publisher, version, config, max(0.0, deadline - time.monotonic()))
                names, questions = {commit.replica for commit in commits}, await reading
                leases = [lease for lease in await self.registry.leases("rollout") if lease.id in names]
                asking = asyncio.gather(*(self._answers(lease, questions, config.rollout.temperature, lost) for lease in leases))
                if answers := [pair for pair in await self.watch(asking, "replicas to answer") if pair is not None]:
                    return [a for greedy, _ in answers for a in greedy], [a for _, sampled in answers for a in sampled]
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"a rollout replica to compare with within {_commit_timeout(config):g} s",
                        "; ".join(f"{name}: {why}" for name, why in lost.items()) or "none with a lease",
                        "See the replicas' logs.",
                    )
                await self.watch(asyncio.sleep(self.again_seconds), "replicas to answer")
        finally:
            await end_all([reading])

    async def _questions(self, config: RunConfig, version: int) -> gates.Questions:
        prompts, stop_ids = await asyncio.to_thread(_prompts, await self.run.model_files(), config)
        return gates.Questions(
            self.run.run_id,
            prompts,
            stop_ids,
            min(gates.NEW_TOKENS, config.rollout.max_new_tokens),
            version,
            config.rollout.chunk_timeout,
            config.security,
        )

    async def _answers(
        self, lease: Lease, questions: gates.Questions, temperature: float, lost: dict[str, str]
    ) -> tuple[Answers, Answers] | None:
        """One replica's answers; None when it is lost first, and then `lost` has the reason. Its lease is checked during the
        call, since the lease of a dead replica expires before the call times out."""

        async def check() -> None:
            if lease.id not in {other.id for other in await self.registry.leases("rollout")}:
                raise gates.ReplicaLostError("its lease has expired")

        try:
            greedy = await self._watched(gates.ask_replica(lease.address, questions, 0.0, 1), check)
            sampled = gates.ask_replica(lease.address, questions, temperature, gates.SAMPLES)
            return greedy, await self._watched(sampled, check)
        except gates.ReplicaLostError as error:
            if lease.id not in lost:
                text = f"replica {lease.id} at {lease.address} was lost before it could be compared: {error}"
                await self.run.emit(ServiceNotice(service="learner", text=text))
            lost[lease.id] = str(error)
            return None

    async def _watched(self, work: Awaitable[T], check: Callable[[], Awaitable[None]]) -> T:
        """Awaits `work` and calls `check` every `state_seconds`. Cancels `work` when `check` raises."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self.state_seconds))[0]:
                await check()
            return task.result()
        finally:
            await end_all([task])  # it may have failed while `check` raised


def _prompts(files: Mapping[str, bytes], config: RunConfig) -> tuple[list[NDArray[np.int64]], tuple[int, ...]]:
    """The ids of a few training prompts, int64 [length] each, and the ids that end a response."""
    template = Template(files, config.data)
    chosen = _spread(load_prompts(config.data.train, config.data, template).prompts, gates.PROMPTS)
    return [prompt.ids.astype(np.int64) for prompt in chosen], template.stop_ids


def _commit_timeout(config: RunConfig) -> float:
    """Seconds within which replicas must serve a version."""
    return config.rollout.start_timeout + (config.eval_hold if config.holds_versions else 0.0)


def _spread(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, evenly spaced."""
    return [items[i * len(items) // count] for i in range(min(count, len(items)))]


def reports_to_run(redis_url: str, run_id: str, interval: float = REPORT_SECONDS) -> LoadReports:
    """`LoadReports` whose records go to a run, each by its own connection: the learner connects only after its models exist."""
    return reports_to(lambda record: asyncio.run(_emit(redis_url, run_id, record)), interval)


async def _emit(redis_url: str, run_id: str, record: MetricRecord) -> None:
    async with attached(redis_url, run_id, ATTACH_SECONDS, RECONNECT_TIMEOUT) as run:
        await run.emit(record)
