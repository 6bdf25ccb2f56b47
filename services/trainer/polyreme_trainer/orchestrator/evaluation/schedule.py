"""Schedules the evaluations of a run: each due version once, one at a time, in order.

Invariant: the log records each version whose evaluation ended or was skipped, so no replica is held at one without evaluation.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Set

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.metric_records import EvaluationFailed
from polyreme.experience.run import Run, RunState
from polyreme_trainer.orchestrator.evaluation.answers import EvaluationError
from polyreme_trainer.orchestrator.evaluation.evaluate import Evaluator
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool

logger = logging.getLogger(__name__)


def pending(version: int, done: Set[int], evaluates: Callable[[int], bool]) -> Iterable[int]:
    """The versions up to `version` that are due, in order: the first version of the run, then those that `evaluates` names."""
    if not done:
        return [version]
    return filter(evaluates, range(max(done) + 1, version + 1))


class EvalSchedule:
    """Runs the evaluations, and decides whether groups may be admitted meanwhile.

    Args:
        ended: called when an evaluation has ended.
    """

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        experience: ExperienceLog,
        pool: ReplicaPool,
        evaluator: Evaluator | None,
        ended: Callable[[], None],
    ) -> None:
        self._run, self._config, self._experience, self._pool = run, config, experience, pool
        self._evaluator, self._ended = evaluator, ended
        self._done: set[int] = set()
        self._resumed_at: int | None = None
        self._exclusive = False
        self._best: tuple[int, float] | None = None  # version and result
        self._worse = 0  # consecutive results without a new best
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    async def load(self) -> None:
        """Reads from the log which version was evaluated, or skipped, last."""
        if (evaluated := await self._experience.evaluated()) >= 0:
            self._done.add(evaluated)

    async def start_next(self, version: int, group: asyncio.TaskGroup) -> None:
        """Starts the evaluation due at the learner's `version`, unless one is running. Skips versions that replicas have left."""
        if self._evaluator is None or self.running or version < 0:
            return
        if self._resumed_at is None:
            self._resumed_at = version
        for due in pending(version, self._done, self._config.evaluates):
            if self._pool.serves_newer(due):
                text = f"version {due} was not evaluated: replicas serve newer versions already"
                await self._finish(due, text if due >= self._resumed_at else None)
                continue
            # Nothing is generated during the run's first evaluation, which is of the initial policy.
            is_last = due == self._config.iterations
            self._exclusive = not self._done or is_last or not self._config.holds(due)
            self._pool.held, self._pool.is_shared = due, False  # the other orchestrators do not evaluate
            self.task = group.create_task(self._evaluate(self._evaluator, due))
            return

    def admits(self, version: int) -> bool:
        """Whether groups may be admitted at the learner's `version`. At newer versions than the held one they would only wait."""
        return not self.running or (not self._exclusive and self._pool.held is not None and version <= self._pool.held)

    async def _evaluate(self, evaluator: Evaluator, version: int) -> None:
        limit = None if self._exclusive else self._config.eval_hold
        failure = None
        try:
            try:
                async with asyncio.timeout(limit) as deadline:
                    score = await evaluator.evaluate(version)
            except EvaluationError as error:
                failure = str(error)
            except TimeoutError:
                if not deadline.expired():  # an UnavailableError is a TimeoutError too
                    raise
                failure = f"the evaluation of version {version} took longer than eval_hold = {limit:g} s"
            await self._finish(version, failure)
            if failure is None:
                await self._stop_if_no_better(version, score)
        finally:
            self._pool.held, self._pool.is_shared = None, True
            self._ended()

    async def _stop_if_no_better(self, version: int, score: float) -> None:
        """Asks the run to save and stop after `eval_stop_after` results in a row without a new best. A resume counts anew."""
        limit = self._config.eval_stop_after
        if self._best is None or score > self._best[1]:
            self._best, self._worse = (version, score), 0
            return
        self._worse += 1
        if limit and self._worse >= limit and version < self._config.iterations:
            reason = f"no better evaluation than that of version {self._best[0]} ({self._best[1]:.3f}) in the {limit} after it"
            await self._run.set_state(RunState.DRAINING, reason)

    async def _finish(self, version: int, failure: str | None) -> None:
        if failure is not None:
            logger.warning("%s", failure)
            await self._run.emit(EvaluationFailed(version=version, text=failure))
        self._done.add(version)
        await self._experience.set_evaluated(version)
