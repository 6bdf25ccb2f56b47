"""The orchestrator: it prepares, waits for the run to start, then admits groups and brings each into the experience log.

Invariant: the next step is derived from the log, never from memory, so a successor continues where a killed orchestrator stopped. Every
group in flight has exactly one task here, for the attempt that the log has.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, DataError, RunFailedError, UnavailableError
from polyreme.experience.device_lease import trains
from polyreme.experience.ledger import Admission, ExperienceLog, StaleAttemptError, TransitionError, Writer
from polyreme.experience.metric_records import GroupsPlanned, ServiceNotice
from polyreme.experience.record_codec import encode_group
from polyreme.experience.run import Run, RunState
from polyreme.process.lifecycle import freeze_gc
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.choose import make_environments
from polyreme_trainer.orchestrator.environment.protocol import Environment, EpisodeError
from polyreme_trainer.orchestrator.evaluation.answers import HeldOutSet, make_answers
from polyreme_trainer.orchestrator.evaluation.evaluate import Evaluator
from polyreme_trainer.orchestrator.evaluation.schedule import EvalSchedule
from polyreme_trainer.orchestrator.generation.generate import GenerateError
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.group import GroupMaker
from polyreme_trainer.orchestrator.prompts.dynamic_sampling import DynamicSampling
from polyreme_trainer.orchestrator.prompts.prompt_filter import PromptFilter
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import ScoreError
from polyreme_trainer.orchestrator.scoring.scoring import Scoring
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherClient, TeacherError
from polyreme_trainer.orchestrator.tasks import task_group, together

logger = logging.getLogger(__name__)

RESCAN_INTERVAL = 2.0
"""Full-rescan interval in seconds; lease expiry emits no event."""
_FIRST_GROUPS = 8
"""The run fails when this many first groups fail for the same reason; fewer if an iteration has fewer groups."""
_SINGLE_NOTICES = 4
"""Number of failed groups that get their own notice."""
_RELEVANT = frozenset({"fail", "drop", "expire", "plan", "version", "commit", "state", "lease", "device", "reward"})


async def orchestrate(run: Run) -> None:
    """Runs until the last iteration is trained and evaluated, or the run drains.

    Raises:
        PolyremeError: the orchestrator cannot continue. An error that a restart would not fix also becomes the run's failure.
    """
    try:
        await _orchestrate(run)
    except (ConfigError, DataError, UnavailableError, RunFailedError) as error:
        with suppress(TransitionError):  # the run has ended already
            await run.set_state(RunState.FAILED, str(error))
        raise


async def _orchestrate(run: Run) -> None:
    config, experience = await run.config(), ExperienceLog(run)
    template = Template(await run.model_files(), config.data)
    train = load_prompts(config.data.train, config.data, template)
    held_out = [(each, load_prompts(each.data, config.data, template)) for each in config.evaluation_sets]
    for name, data in (("training", train), *((f"held-out {each.name}".rstrip(), data) for each, data in held_out)):
        omitted = (
            (data.filtered, "filtered as too long"),
            (data.duplicates, "as repeated"),
            (data.unlabelled, "without a reference answer"),
        )
        await _notice(
            run, ", ".join([f"{len(data.prompts)} {name} prompts", *(f"{count} {why}" for count, why in omitted if count)])
        )
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
    sampler = Sampler(run.run_id, config, template, pool)
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


async def _notice(run: Run, text: str) -> None:
    logger.info("%s", text)
    await run.emit(ServiceNotice(service="orchestrator", text=text))


class Orchestrator:
    """The main loop and the groups' tasks."""

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
        self._run, self._config, self._experience = run, config, experience
        self._pool, self._scoring, self._maker = pool, scoring, maker
        self._environments, self._environment = environments, environments[""]
        self._partial_log, self._budget = partial_log, budget
        self._wake = asyncio.Event()
        self._schedule = EvalSchedule(run, config, experience, pool, evaluator, ended=self._wake.set)
        self._attempts: dict[int, int] = {}
        self._unassigned: set[Admission] = set()  # in flight without a task at the last rescan
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._planned = 0
        self._sampling = DynamicSampling(config.recipe.dynamic_sampling, config.groups_per_iteration)
        self._filter = PromptFilter(config.recipe.skip_prompts, config.seed, experience, maker.prompt_of)
        self._failed = 0
        self._first = sys.maxsize  # index of the first group that was worked on
        self._verdicts: dict[str, set[int]] = {}  # reason -> groups that failed before anything was scored
        self._signals: set[str] = set()
        self._next_rescan = 0.0

    async def work(self) -> None:
        """Works until the run drains, is done, or has nothing left to generate and evaluate."""
        await self._schedule.load()
        self._planned = await self._experience.planned()
        self._pool.idle_time.take(time.monotonic())  # there was no work for replicas before
        async with task_group() as group:
            helpers = [
                group.create_task(self._watch()),
                group.create_task(self._partial_log.save_regularly()),
                group.create_task(self._pool.watch_stragglers()),
                *([] if self._budget is None else [group.create_task(self._budget.follow_pauses())]),
            ]
            in_flight = await self._experience.in_flight()
            await self._partial_log.load(in_flight)
            for admission in in_flight:
                self._start(group, admission)
            if self._tasks:
                await _notice(self._run, f"took over {len(self._tasks)} groups in flight")
            signals: set[str] = set(_RELEVANT)
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
                    await self._assign(group)
                if self._budget is not None:
                    await self._budget.update()
                if not signals or "plan" in signals:
                    await self._report_idle_time()
                if await self._advance(group):
                    await self._report_idle_time()
                    break
                while (signals := await self._next_signals()) == {"commit"}:  # two per version and replica; they admit nothing
                    await self._pool.take_commits()
            for task in (*helpers, self._schedule.task, *self._tasks.values()):
                if task is not None:
                    task.cancel()

    async def _advance(self, group: asyncio.TaskGroup) -> bool:
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
                self._start(group, admission)
        return False

    async def _report_idle_time(self) -> None:
        """Emits the idle time of the replicas between two plans, once per new plan."""
        planned = await self._experience.planned()
        if planned > self._planned:
            seconds = self._pool.idle_time.take(time.monotonic())
            paused = {} if self._budget is None else self._budget.take()
            outside = await self._environment.metrics()
            metrics = {"time/rollout_wait": seconds, **self._sampling.take(), **self._filter.take(), **paused, **outside}
            await self._run.emit(GroupsPlanned(iteration=planned, metrics=metrics))
            self._planned = planned

    def _start(self, group: asyncio.TaskGroup, admission: Admission) -> None:
        index = admission.index
        self._first = min(self._first, index)
        self._attempts[index] = admission.attempt
        task = self._tasks[index] = group.create_task(self._make_group(admission))

        def forget(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(index) is ended:
                del self._tasks[index], self._attempts[index]

        task.add_done_callback(forget)

    async def _make_group(self, admission: Admission) -> None:
        """Brings one group into the log, over as many attempts as necessary."""
        attempt: Admission | None = admission
        try:
            while attempt is not None:
                self._attempts[attempt.index] = attempt.attempt
                attempt = await self._attempt(attempt)
        except StaleAttemptError as error:
            logger.warning("abandoning group %d: %s", admission.index, error)

    async def _attempt(self, admission: Admission) -> Admission | None:
        """Runs one attempt. Returns the next one when it failed, None when the group has reached its final state."""
        index, number = admission.index, admission.attempt
        try:
            if await self._filter.skips(admission):
                return None
            record = await self._maker.make(admission)
            tally, score = self._filter.count_solved(record), record.mean_reward
            if self._sampling.drops(record):
                await self._experience.drop(index, number, "equal scores", score, tally)
            else:
                await self._experience.append(index, number, encode_group(record), record.oldest_version, score, tally)
            return None
        except (GenerateError, ScoreError, TeacherError, EpisodeError, DataError) as error:
            if isinstance(error, ScoreError):
                self._check_first_groups(index, error)
            return await self._retry(admission, str(error))
        except StaleAttemptError:  # it expired during the append
            return await self._retry(admission, "expired")

    def _check_first_groups(self, index: int, error: ScoreError) -> None:
        """Fails a run whose first groups all fail for the same reason in the rewards, since neither waiting nor more attempts would help.

        Raises:
            RunFailedError: the groups failed for that reason.
        """
        if self._scoring.proven or not error.verdict:
            return
        failed = self._verdicts.setdefault(error.verdict, set())
        failed.add(index)
        count = max(2, min(_FIRST_GROUPS, self._config.groups_per_iteration))
        if failed >= set(range(self._first, self._first + count)):
            raise RunFailedError(
                "scores for the first groups of the run",
                f"all samples of the first {count} groups failed for one reason: {error}",
                "Fix the reward or the data, then start the run again.",
            )

    async def _retry(self, failed: Admission, reason: str) -> Admission | None:
        limit = self._config.max_attempts
        logger.warning("group %d, attempt %d of %d: %s", failed.index, failed.attempt, limit, reason)
        if admission := await self._experience.readmit(failed.index, failed.attempt, reason, limit):
            return admission
        await self._report_failed(failed.index, reason)
        fraction = await self._experience.failed_fraction()
        if fraction > self._config.max_failed_fraction:
            raise RunFailedError(
                f"at most max_failed_fraction = {self._config.max_failed_fraction:.0%} of the newest 50 groups to fail",
                f"{fraction:.0%} failed, the last one because {reason}",
                "Fix the cause, then continue with --resume.",
            )
        return None

    async def _report_failed(self, index: int, reason: str) -> None:
        """Emits a notice for each of the first failed groups, then at every doubling of their number."""
        self._failed += 1
        if self._failed <= _SINGLE_NOTICES or self._failed.bit_count() == 1:
            count = f"; {self._failed} groups have failed so far" if self._failed > _SINGLE_NOTICES else ""
            await _notice(self._run, f"group {index} failed after {self._config.max_attempts} attempts: {reason}{count}")

    async def _assign(self, group: asyncio.TaskGroup) -> None:
        """Gives every attempt in flight exactly one task. A plan may have expired attempts, and a task may be lost.

        A task that is just ending is not lost: its attempt is no longer in flight at the next rescan.
        """
        unassigned: set[Admission] = set()
        for admission in await self._experience.in_flight():
            index, task = admission.index, self._tasks.get(admission.index)
            if task is None:
                unassigned.add(admission)
                if admission in self._unassigned:
                    logger.warning("group %d: attempt %d had no task", index, admission.attempt)
                    self._start(group, admission)
            elif self._attempts[index] < admission.attempt:
                logger.warning("group %d: attempt %d expired", index, self._attempts[index])
                task.cancel()
                self._start(group, admission)
        self._unassigned = unassigned

    async def _watch(self) -> None:
        last = await self._run.last_event()
        while True:
            last, signals = await self._run.watch(last, 2000)
            if relevant := {kind for kind, _ in signals} & _RELEVANT:
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
