"""The orchestrator's life: prepare, wait for the run to start, then admit groups and bring each into the log.

Invariant: what is to be done next is read off the log, never remembered, so that a successor goes on where a killed orchestrator stood.
Every group in flight has exactly one task here, working on the attempt that the log has.
"""

import asyncio
import logging
import sys
import time
from contextlib import suppress

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, DataError, RunFailedError, UnavailableError
from polyreme.experience.ledger import Admission, ExperienceLog, Role, StaleAttemptError, TransitionError
from polyreme.experience.records import encode_group
from polyreme.experience.run import Run, RunState
from polyreme.process.lifecycle import settle
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.dynamic_sampling import DynamicSampling
from polyreme_trainer.orchestrator.evaluate import Evaluator
from polyreme_trainer.orchestrator.generate import GenerateError
from polyreme_trainer.orchestrator.group import GroupMaker
from polyreme_trainer.orchestrator.partial_rollout_log import Snapshots
from polyreme_trainer.orchestrator.replica_pool import Fleet
from polyreme_trainer.orchestrator.reward_client import Rewards, ScoreError
from polyreme_trainer.orchestrator.schedule import Schedule
from polyreme_trainer.orchestrator.tasks import task_group, together

_log = logging.getLogger(__name__)

HEARTBEAT = 2.0
"""Seconds after which everything is looked at, signal or not: a lease that expires gives none."""
_FIRST_GROUPS = 8
"""The run ends when so many first groups fail for one reason; fewer where an iteration has fewer."""
_TOLD_SINGLY = 4
"""Failed groups that are told one by one."""
_RELEVANT = frozenset({"fail", "drop", "expire", "plan", "version", "commit", "state", "lease"})


async def orchestrate(run: Run) -> None:
    """Runs until the last iteration is trained and evaluated, or the run drains.

    Raises:
        PolyremeError: it cannot go on. What a restart would meet again is also set as the run's failure.
    """
    try:
        await _orchestrate(run)
    except (ConfigError, DataError, UnavailableError, RunFailedError) as error:
        with suppress(TransitionError):  # it has ended already, for whatever reason stands there
            await run.set_state(RunState.FAILED, str(error))
        raise


async def _orchestrate(run: Run) -> None:
    config, log = await run.config(), ExperienceLog(run)
    template = Template(await run.model_files(), config.data)
    train = load_prompts(config.data.train, config.data, template)
    held_out = load_prompts(config.data.eval, config.data, template) if config.data.eval else None
    for name, data in (("training", train), ("held-out", held_out)):
        if data:
            await _notice(
                run, f"{len(data.prompts)} {name} prompts, {data.filtered} filtered as too long (template {template.digest})"
            )
    term = await log.take(Role.ORCHESTRATOR)
    _log.info("term %d", term.counter)
    fleet, rewards = (
        Fleet(run, log, config.rollout.start_timeout, config.rollout.max_num_seqs, config.security),
        Rewards(run, config.reward, proven=await log.planned() > 0),
    )
    wanted = config.rollout.replicas if await run.check() is RunState.STARTING else 1  # a run under way goes on with those it has
    await together([fleet.wait_for(wanted), rewards.wait_for(1)])
    if await run.until(lambda: _started(run)) is not RunState.RUNNING:
        return
    maker = GroupMaker(run.run_id, config, template, train.prompts, fleet, rewards, Snapshots(log))
    evaluator = Evaluator(run, config, template, held_out.prompts, fleet, rewards) if held_out else None
    settle()
    try:
        await Orchestrator(run, config, log, fleet, rewards, maker, evaluator).work()
    finally:
        await fleet.close()
        await rewards.close()


async def _started(run: Run) -> RunState | None:
    state = await run.check()
    return None if state is RunState.STARTING else state


async def _notice(run: Run, text: str) -> None:
    _log.info("%s", text)
    await run.emit({"kind": "notice", "service": "orchestrator", "text": text})


class Orchestrator:
    """The main loop and the groups' tasks."""

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        log: ExperienceLog,
        fleet: Fleet,
        rewards: Rewards,
        maker: GroupMaker,
        evaluator: Evaluator | None,
    ) -> None:
        self._run, self._config, self._log = run, config, log
        self._fleet, self._rewards, self._maker = fleet, rewards, maker
        self._schedule = Schedule(run, config, log, fleet, evaluator, ended=lambda: self._wake.set())
        self._attempts: dict[int, int] = {}
        self._alone: set[Admission] = set()  # in flight without a task, as seen in the last look
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._planned = 0
        self._sampling = DynamicSampling(config.recipe.dynamic_sampling, config.groups_per_iteration)
        self._failed = 0
        self._first = sys.maxsize  # index of the first group that was worked on
        self._verdicts: dict[str, set[int]] = {}  # groups that failed before anything was scored, by the reason
        self._signals: set[str] = set()
        self._beat = 0.0
        self._wake = asyncio.Event()

    async def work(self) -> None:
        """Until the run drains, is done, or has nothing left to generate and evaluate."""
        await self._schedule.recall()
        self._planned = await self._log.planned()
        self._fleet.idleness.take(time.monotonic())  # before now there was no work for replicas
        async with task_group() as group:
            helpers = [
                group.create_task(self._watch()),
                group.create_task(self._maker.snapshots.keep()),
                group.create_task(self._fleet.watch()),
            ]
            in_flight = await self._log.in_flight()
            await self._maker.snapshots.load(in_flight)
            for admission in in_flight:
                self._start(group, admission)
            if self._tasks:
                await _notice(self._run, f"took over {len(self._tasks)} groups in flight")
            signals: set[str] = set(_RELEVANT)
            while (await self._run.check()) is RunState.RUNNING:
                if not signals or signals & {"lease", "version"}:
                    await self._fleet.refresh()
                    await self._rewards.refresh()
                elif "commit" in signals:  # as many as there are replicas come with every version
                    await self._fleet.take_commits()
                if not signals or "expire" in signals:
                    await self._match(group)
                if not signals or "plan" in signals:
                    await self._tell_wait()
                if await self._advance(group):
                    await self._tell_wait()
                    break
                signals = await self._next_signals()
            for task in (*helpers, self._schedule.task, *self._tasks.values()):
                if task is not None:
                    task.cancel()

    async def _advance(self, group: asyncio.TaskGroup) -> bool:
        """Starts the evaluation that is due, and admits what may be. Returns whether nothing is left to do."""
        version = await self._log.version()
        await self._schedule.start_next(version, group)
        if version >= self._config.iterations:
            return not self._schedule.running
        if not self._schedule.admits(version):
            return False
        while not self._rewards.paused and (admissions := await self._log.admit(self._config.groups_per_iteration)):
            for admission in admissions:
                self._start(group, admission)
        return False

    async def _tell_wait(self) -> None:
        """Of each iteration whose plan is new: for how long replicas had nothing to do since the plan before it."""
        planned = await self._log.planned()
        if planned > self._planned:
            seconds = self._fleet.idleness.take(time.monotonic())
            waited = {"kind": "rollout", "iteration": planned, "time/rollout_wait": seconds}
            await self._run.emit({**waited, **self._sampling.take()})
            self._planned = planned

    def _start(self, group: asyncio.TaskGroup, admission: Admission) -> None:
        index = admission.index
        self._first = min(self._first, index)
        self._attempts[index] = admission.attempt
        task = self._tasks[index] = group.create_task(self._bring_in(admission))

        def forget(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(index) is ended:
                del self._tasks[index], self._attempts[index]

        task.add_done_callback(forget)

    async def _bring_in(self, admission: Admission) -> None:
        """A group, from its admission to the log, over as many attempts as it takes."""
        attempt: Admission | None = admission
        try:
            while attempt is not None:
                self._attempts[attempt.index] = attempt.attempt
                attempt = await self._attempt(attempt)
        except StaleAttemptError as error:
            _log.warning("group %d is given up here: %s", admission.index, error)

    async def _attempt(self, admission: Admission) -> Admission | None:
        """One attempt. Returns the next one when it failed, None when the group is settled."""
        index, number = admission.index, admission.attempt
        try:
            record = await self._maker.make(admission)
            if self._sampling.drops(record):
                await self._log.drop(index, number, "equal scores", record.mean_reward)
                return None
            await self._log.append(index, number, encode_group(record), record.oldest_version, record.mean_reward)
            return None
        except (GenerateError, ScoreError, DataError) as error:
            if isinstance(error, ScoreError):
                self._check_first_groups(index, error)
            return await self._try_again(admission, str(error))
        except StaleAttemptError:  # it expired while it was appended
            return await self._try_again(admission, "expired")

    def _check_first_groups(self, index: int, error: ScoreError) -> None:
        """Ends a run whose first groups all fail for one reason that lies with the rewards: waiting and more attempts change nothing.

        Raises:
            RunFailedError: with that reason.
        """
        if self._rewards.health.proven or not error.verdict:
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

    async def _try_again(self, failed: Admission, reason: str) -> Admission | None:
        limit = self._config.max_attempts
        _log.warning("group %d, attempt %d of %d: %s", failed.index, failed.attempt, limit, reason)
        if admission := await self._log.readmit(failed.index, failed.attempt, reason, limit):
            return admission
        await self._tell_failed(failed.index, reason)
        fraction = await self._log.failed_fraction()
        if fraction > self._config.max_failed_fraction:
            raise RunFailedError(
                f"at most max_failed_fraction = {self._config.max_failed_fraction:.0%} of the newest 50 groups to fail",
                f"{fraction:.0%} failed, the last one because {reason}",
                "Mend the cause, then go on with --resume.",
            )
        return None

    async def _tell_failed(self, index: int, reason: str) -> None:
        """The first failed groups one by one, then at every doubling: a run of many has no room for all."""
        self._failed += 1
        if self._failed <= _TOLD_SINGLY or self._failed.bit_count() == 1:
            count = f"; {self._failed} groups have failed so far" if self._failed > _TOLD_SINGLY else ""
            await _notice(self._run, f"group {index} failed after {self._config.max_attempts} attempts: {reason}{count}")

    async def _match(self, group: asyncio.TaskGroup) -> None:
        """Every attempt in flight has a task, and no other has: the learner's plan may have let attempts expire, a task may be lost.

        One that just ends is not lost: what it appended is in flight in this look at most, not in the next one.
        """
        alone: set[Admission] = set()
        for admission in await self._log.in_flight():
            index, task = admission.index, self._tasks.get(admission.index)
            if task is None:
                alone.add(admission)
                if admission in self._alone:
                    _log.warning("group %d: nobody is at attempt %d", index, admission.attempt)
                    self._start(group, admission)
            elif self._attempts[index] < admission.attempt:
                _log.warning("group %d: attempt %d expired", index, self._attempts[index])
                task.cancel()
                self._start(group, admission)
        self._alone = alone

    async def _watch(self) -> None:
        last = await self._run.last_event()
        while True:
            last, signals = await self._run.watch(last, 2000)
            if relevant := {kind for kind, _ in signals} & _RELEVANT:
                self._signals |= relevant
                self._wake.set()

    async def _next_signals(self) -> set[str]:
        """What has happened since the last call; nothing at a heartbeat, after which everything is looked at."""
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._beat):
                await self._wake.wait()
        self._wake.clear()
        signals, self._signals = self._signals, set()
        if loop.time() < self._beat:
            return signals
        self._beat = loop.time() + HEARTBEAT
        return set()
