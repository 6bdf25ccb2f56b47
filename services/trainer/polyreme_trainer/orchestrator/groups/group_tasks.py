"""The groups in flight of one orchestrator: it brings each into the experience log.

Invariant: every group in flight has exactly one task here, for the attempt that the log has.
"""

import asyncio
import logging
import sys

from polyreme.config.run import RunConfig
from polyreme.errors import RunFailedError
from polyreme.experience.ledger import Admission, ExperienceLog, StaleAttemptError
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.record_codec import encode_group
from polyreme.experience.run import Run
from polyreme_trainer.orchestrator.environment.protocol import ATTEMPT_ERRORS
from polyreme_trainer.orchestrator.groups.counts import Counts, total
from polyreme_trainer.orchestrator.groups.group_maker import GroupMaker
from polyreme_trainer.orchestrator.prompts.prompt_filter import DynamicSampling, PromptFilter
from polyreme_trainer.orchestrator.scoring.score_call import ScoreError
from polyreme_trainer.orchestrator.scoring.scoring import Scoring

logger = logging.getLogger(__name__)

_FIRST_GROUPS = 8
"""The run fails when this many first groups fail for the same reason; fewer if an iteration has fewer groups."""
_SINGLE_NOTICES = 4
"""Number of failed groups that get their own notice."""


class GroupTasks:
    """The tasks, by group.

    Args:
        experience: the log, with the orchestrator's term.
        scoring: has scored groups of this run, or not yet.
        maker: makes the groups.
    """

    def __init__(self, run: Run, config: RunConfig, experience: ExperienceLog, scoring: Scoring, maker: GroupMaker) -> None:
        self._run, self._config, self._experience = run, config, experience
        self._scoring, self._maker, self._shard = scoring, maker, experience.shard
        self._attempts: dict[int, int] = {}
        self._unassigned: set[Admission] = set()  # in flight without a task at the last rescan
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sampling = DynamicSampling(config.recipe.dynamic_sampling, config.groups_per_iteration, self._shard)
        self._filter = PromptFilter(config.recipe.skip_prompts, config.seed, experience, maker.prompt_of)
        self._ended = self._failed = 0
        self._first = sys.maxsize  # index of the first group that was worked on
        self._verdicts: dict[str, set[int]] = {}  # reason -> groups that failed before anything was scored

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self) -> tuple[int, Counts]:
        """The number of groups that were brought into the log since the last call, and what was counted."""
        ended, self._ended = self._ended, 0
        return ended, total((self._sampling.take(), self._filter.take()))

    def next_iteration(self) -> None:
        """The groups of an iteration are planned."""
        self._sampling.next_iteration()

    def cancel(self) -> None:
        """Ends all tasks."""
        for task in self._tasks.values():
            task.cancel()

    def start(self, group: asyncio.TaskGroup, admission: Admission) -> None:
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
                self._ended += 1
                return None
            record = await self._maker.make(admission)
            tally, score = self._filter.count_solved(record), record.mean_reward
            if self._sampling.drops(record):
                await self._experience.drop(index, number, "equal scores", score, tally)
            else:
                await self._experience.append(index, number, encode_group(record), record.oldest_version, score, tally)
            self._ended += 1
            return None
        except ATTEMPT_ERRORS as error:
            if isinstance(error, ScoreError):
                self._check_first_groups(index, error)
            return await self._retry(admission, str(error))
        except StaleAttemptError:  # it expired during the append
            return await self._retry(admission, "expired")

    def _check_first_groups(self, index: int, error: ScoreError) -> None:
        """Fails a run whose first groups all fail for one reason in the rewards, since neither waiting nor retrying would help.

        Raises:
            RunFailedError: the groups failed for that reason.
        """
        if self._scoring.proven or not error.verdict:
            return
        failed = self._verdicts.setdefault(error.verdict, set())
        failed.add(index)
        count = max(2, min(_FIRST_GROUPS, self._shard.share(self._config.groups_per_iteration)))
        if failed >= set(range(self._first, self._first + count * self._shard.count, self._shard.count)):
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
            text = f"group {index} failed after {self._config.max_attempts} attempts: {reason}{count}"
            logger.info("%s", text)
            await self._run.emit(ServiceNotice(service=self._shard.name, text=text))

    async def assign(self, group: asyncio.TaskGroup) -> None:
        """Gives every attempt in flight exactly one task. A plan may have expired attempts, and a task may be lost.

        A task that is just ending is not lost: its attempt is no longer in flight at the next rescan.
        """
        unassigned: set[Admission] = set()
        for admission in await self._experience.in_flight(self._shard):
            index, task = admission.index, self._tasks.get(admission.index)
            if task is None:
                unassigned.add(admission)
                if admission in self._unassigned:
                    logger.warning("group %d: attempt %d had no task", index, admission.attempt)
                    self.start(group, admission)
            elif self._attempts[index] < admission.attempt:
                logger.warning("group %d: attempt %d expired", index, self._attempts[index])
                task.cancel()
                self.start(group, admission)
        self._unassigned = unassigned
