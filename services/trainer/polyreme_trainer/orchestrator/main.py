"""The orchestrator: it prepares, waits for the run to start, then admits groups and brings each into the experience log.

A run may have several, which share the groups by index. Invariant: the next step is derived from the log, never from memory, so a
successor continues where a killed orchestrator stopped.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, DataError, RunFailedError, UnavailableError
from polyreme.experience.device_lease import trains
from polyreme.experience.ledger import ExperienceLog, TransitionError, Writer
from polyreme.experience.metric_records import GroupsPlanned, ServiceNotice
from polyreme.experience.run import Run, RunState
from polyreme.experience.shard import Shard
from polyreme.process.lifecycle import freeze_gc
from polyreme.process.tasks import task_group, together
from polyreme_trainer.data.prompts import Dataset, load_prompts
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.choose import make_environments
from polyreme_trainer.orchestrator.environment.protocol import Environment
from polyreme_trainer.orchestrator.evaluation.answers import HeldOutSet, make_answers
from polyreme_trainer.orchestrator.evaluation.evaluate import Evaluator
from polyreme_trainer.orchestrator.evaluation.schedule import EvalSchedule
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import ReplicaSampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.groups.counts import OrchestratorWork, metrics_of, total
from polyreme_trainer.orchestrator.groups.group_maker import GroupMaker
from polyreme_trainer.orchestrator.groups.group_tasks import GroupTasks
from polyreme_trainer.orchestrator.groups.reports import Reports
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.scoring import Scoring
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherClient

logger = logging.getLogger(__name__)

RESCAN_INTERVAL = 2.0
"""Full-rescan interval in seconds; lease expiry emits no event."""
_RELEVANT = frozenset({"fail", "drop", "expire", "plan", "version", "commit", "state", "lease", "device", "reward", "pause"})


async def orchestrate(run: Run, number: int = 0) -> None:
    """Runs until the last iteration is trained and evaluated, or the run drains.

    Args:
        number: of this orchestrator, if the run has several: see `Shard`.

    Raises:
        PolyremeError: the orchestrator cannot continue. An error that a restart would not fix also becomes the run's failure.
    """
    try:
        await _orchestrate(run, number)
    except (ConfigError, DataError, UnavailableError, RunFailedError) as error:
        with suppress(TransitionError):  # the run has ended already
            await run.set_state(RunState.FAILED, str(error))
        raise


async def _orchestrate(run: Run, number: int) -> None:
    config = await run.config()
    experience = ExperienceLog(run, shard=Shard(number, config.trainer.orchestrators))
    template = Template(await run.model_files(), config.data)
    train = load_prompts(config.data.train, config.data, template)
    held_out = []
    if experience.shard.leads:
        held_out = [(each, load_prompts(each.data, config.data, template)) for each in config.evaluation_sets]
        await _report_data(run, [("training", train), *((f"held-out {each.name}".rstrip(), data) for each, data in held_out)])
    logger.info("template %s", template.digest)
    term = await experience.take(Writer.ORCHESTRATOR)
    logger.info("term %d", term.counter)
    pool = ReplicaPool(run, experience, config.rollout.start_timeout, config.rollout.max_num_seqs, config.security)
    proven = await experience.planned() > 0
    rewards = None if config.reward is None else RewardClient(run, config.reward, template.token_texts, proven)
    teacher = None if config.teacher is None else TeacherClient(run, config.teacher)
    scoring, partial_log, tokens = Scoring(rewards, teacher), PartialRolloutLog(experience), config.rollout.tokens_per_iteration
    bounds = config.groups_per_iteration, config.max_staleness
    budget = None if tokens is None else TokenBudget(tokens, *bounds, experience, partial_log, lambda: pool.held)
    sampler = ReplicaSampler(run.run_id, config, template, pool)
    environments = make_environments(run, sampler, scoring, partial_log, budget, experience)
    is_new = await run.check() is RunState.STARTING  # a running run continues with the replicas that it has
    wanted = config.rollout.replicas if is_new else 1
    waits = [pool.wait_for(wanted), *(each.wait_ready() for each in environments.values())]
    waits += [rewards.wait_for(1)] if rewards else []
    waits += [teacher.check(template, config.longest_sequence)] if teacher else []
    await together(waits)
    if await run.until(lambda: _started(run)) is not RunState.RUNNING:
        return
    maker = GroupMaker(config, train, environments[""])
    sets = [HeldOutSet(each, data.prompts[: each.samples]) for each, data in held_out]
    evaluator = Evaluator(run, config, sets, make_answers(run, sampler, rewards, environments)) if sets else None
    freeze_gc()
    try:
        await Orchestrator(run, config, experience, pool, scoring, maker, evaluator, environments, partial_log, budget).work()
    finally:
        await pool.close()
        for environment in environments.values():
            await environment.close()


async def _started(run: Run) -> RunState | None:
    state = await run.check()
    return None if state is RunState.STARTING else state


async def _report_data(run: Run, found: Sequence[tuple[str, Dataset]]) -> None:
    for name, data in found:
        omitted = (
            (data.filtered, "filtered as too long"),
            (data.duplicates, "as repeated"),
            (data.unlabelled, "without a reference answer"),
        )
        await _notice(
            run, ", ".join([f"{len(data.prompts)} {name} prompts", *(f"{count} {why}" for count, why in omitted if count)])
        )


async def _notice(run: Run, text: str, service: str = "orchestrator") -> None:
    logger.info("%s", text)
    await run.emit(ServiceNotice(service=service, text=text))


class Orchestrator:
    """The main loop. The leading orchestrator admits the groups of all and evaluates; each makes its own."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        experience: ExperienceLog,
        pool: ReplicaPool,
        scoring: Scoring,
        maker: GroupMaker,
        evaluator: Evaluator | None,
        environments: Mapping[str, Environment],
        partial_log: PartialRolloutLog,
        budget: TokenBudget | None,
    ) -> None:
        self._run, self._config, self._experience, self._shard = run, config, experience, experience.shard
        self._pool, self._scoring = pool, scoring
        self._environments, self._environment = environments, environments[""]
        self._partial_log, self._budget = partial_log, budget
        self._wake = asyncio.Event()
        self._schedule = EvalSchedule(run, config, experience, pool, evaluator, ended=self._wake.set)
        self._groups = GroupTasks(run, config, experience, scoring, maker)
        self._reports = Reports(experience)
        self._planned, self._since = 0, 0.0  # the newest plan that was reported, and the time of the report
        self._relevant = _RELEVANT if self._shard.leads else _RELEVANT | {"admit"}
        self._next_index = 0  # above all groups that were admitted at the last look, of a follower
        self._signals: set[str] = set()
        self._next_rescan = 0.0

    async def work(self) -> None:
        """Works until the run drains, is done, or has nothing left to generate and evaluate."""
        await self._schedule.load()
        self._planned = await self._experience.planned()
        await self._reports.since()
        self._done()  # there was no work for replicas before
        async with task_group() as group:
            helpers = [
                group.create_task(self._watch()),
                group.create_task(self._partial_log.save_regularly()),
                group.create_task(self._pool.watch_stragglers()),
                *([] if self._budget is None else [group.create_task(self._budget.follow_pauses())]),
            ]
            await self._take_over(group)
            signals: set[str] = set(self._relevant)
            while (await self._run.check()) is RunState.RUNNING:
                if self._config.placement == "colocated" and (not signals or "device" in signals):
                    self._pool.set_asleep(await trains(self._run))
                if not signals or "lease" in signals:
                    await self._pool.refresh()
                    for environment in self._environments.values():
                        await environment.refresh()
                elif "commit" in signals:
                    await self._pool.take_commits()
                if not signals or "expire" in signals:
                    await self._groups.assign(group)
                if self._budget is not None:
                    await self._budget.update()
                if not signals or "plan" in signals:
                    await self._report()
                if await (self._lead(group) if self._shard.leads else self._follow(group)):
                    await self._report()
                    break
                while (signals := await self._next_signals()) == {"commit"}:  # two per version and replica; they admit nothing
                    await self._pool.take_commits()
            self._groups.cancel()
            for task in (*helpers, self._schedule.task):
                if task is not None:
                    task.cancel()

    async def _take_over(self, group: asyncio.TaskGroup) -> None:
        """Continues the groups in flight of a predecessor."""
        self._next_index = await self._experience.next_index()
        in_flight = [each for each in await self._experience.in_flight(self._shard) if each.index < self._next_index]
        await self._partial_log.load(in_flight)
        for admission in in_flight:
            self._groups.start(group, admission)
        if in_flight:
            await _notice(self._run, f"took over {len(in_flight)} groups in flight", self._shard.name)

    async def _lead(self, group: asyncio.TaskGroup) -> bool:
        """Starts the evaluation that is due, and admits groups. Returns whether nothing is left to do."""
        version = await self._experience.version()
        await self._schedule.start_next(version, group)
        if version >= self._config.iterations:
            return not self._schedule.running
        if not self._schedule.admits(version):
            return False
        if await self._environment.collect():
            return False
        while not self._scoring.paused and (admissions := await self._experience.admit(self._config.groups_per_iteration)):
            for admission in admissions:
                if self._shard.owns(admission.index):
                    self._groups.start(group, admission)
        return False

    async def _follow(self, group: asyncio.TaskGroup) -> bool:
        """Starts the groups that the leading orchestrator has admitted for this one. Returns whether nothing is left to do."""
        version = await self._experience.version()
        if version >= self._config.iterations:
            return True
        evaluated = await self._experience.evaluated() if self._config.holds_versions else version
        self._pool.held = next(filter(self._config.holds, range(evaluated + 1, version + 1)), None)
        upcoming = await self._experience.next_index()
        for admission in await self._experience.admitted(self._shard.among(self._next_index, upcoming)):
            self._groups.start(group, admission)
        self._next_index = upcoming
        return False

    async def _report(self) -> None:
        """Emits what all orchestrators have done since the plan before, once per new plan. Others tell the leading one."""
        planned = await self._experience.planned()
        is_new, self._planned = planned > self._planned, planned
        if is_new:
            self._groups.next_iteration()
        if not self._shard.leads:
            await self._reports.add(self._done())
        elif is_new:
            own, others = self._done(), await self._reports.since()
            metrics = {**metrics_of(own, others), **await self._environment.metrics()}
            groups = [each.groups for each in (own, *others)] if others else None
            await self._run.emit(GroupsPlanned(iteration=planned, groups=groups, metrics=metrics))

    def _done(self) -> OrchestratorWork:
        """What this orchestrator has done since the last call."""
        now, (groups, counts) = time.monotonic(), self._groups.take()
        seconds, self._since = now - self._since, now
        paused = {} if self._budget is None else self._budget.take()
        return OrchestratorWork(groups, self._pool.idle_time.take(now), seconds, total((counts, paused)))

    async def _watch(self) -> None:
        last = await self._run.last_event()
        while True:
            last, signals = await self._run.watch(last, 2000)
            if relevant := {kind for kind, _ in signals} & self._relevant:
                self._signals |= relevant
                self._wake.set()

    async def _next_signals(self) -> set[str]:
        """The events since the last call; empty when a full rescan is due."""
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_rescan):
                await self._wake.wait()
        self._wake.clear()
        signals, self._signals = self._signals, set()
        if loop.time() < self._next_rescan:
            return signals
        self._next_rescan = loop.time() + RESCAN_INTERVAL
        return set()
