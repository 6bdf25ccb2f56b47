"""Which version is evaluated when: each that is due once, one at a time, in their order.

Invariant: a version whose evaluation has ended, or is given up, is told to the log, so that no replica is kept at it for nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Set

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme_trainer.orchestrator.evaluate import EvaluationError, Evaluator
from polyreme_trainer.orchestrator.replica_pool import Fleet

_log = logging.getLogger(__name__)


def pending(version: int, done: Set[int], evaluates: Callable[[int], bool]) -> Iterable[int]:
    """Which of the versions up to `version` are to be evaluated, in order: the first that there is, then what the schedule asks for."""
    if not done:
        return [version]
    return filter(evaluates, range(max(done) + 1, version + 1))


class Schedule:
    """Runs the evaluations of a run, and says what they leave room for.

    Args:
        ended: called when one has ended.
    """

    def __init__(
        self,
        run: Run,
        config: RunConfig,
        log: ExperienceLog,
        fleet: Fleet,
        evaluator: Evaluator | None,
        ended: Callable[[], None],
    ) -> None:
        self._run, self._config, self._log, self._fleet = run, config, log, fleet
        self._evaluator, self._ended = evaluator, ended
        self._done: set[int] = set()
        self._reached: int | None = None
        self._alone = False
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    async def recall(self) -> None:
        """Reads from the log which version was evaluated, or given up, last."""
        if (evaluated := await self._log.evaluated()) >= 0:
            self._done.add(evaluated)

    async def start_next(self, version: int, group: asyncio.TaskGroup) -> None:
        """Starts what is due at the learner's `version`, unless an evaluation is under way. What replicas have left is given up."""
        if self._evaluator is None or self.running or version < 0:
            return
        if self._reached is None:
            self._reached = version
        for wanted in pending(version, self._done, self._config.evaluates):
            if self._fleet.passed(wanted):
                text = f"version {wanted} was not evaluated: replicas serve newer ones already"
                await self._settle(wanted, text if wanted >= self._reached else None)
                continue
            # Nothing else keeps the replicas busy during the run's first evaluation: it is of the policy that the run starts from.
            last = wanted == self._config.iterations
            self._alone = not self._done or last or not self._config.holds(wanted)
            self._fleet.held = wanted
            self.task = group.create_task(self._evaluate(self._evaluator, wanted))
            return

    def admits(self, version: int) -> bool:
        """Whether groups may be admitted at the learner's `version`. Admitted at a newer one than is held, they would only wait."""
        return not self.running or (not self._alone and self._fleet.held is not None and version <= self._fleet.held)

    async def _evaluate(self, evaluator: Evaluator, version: int) -> None:
        limit = None if self._alone else self._config.eval_hold
        failure = None
        try:
            try:
                async with asyncio.timeout(limit) as deadline:
                    await evaluator.evaluate(version)
            except EvaluationError as error:
                failure = str(error)
            except TimeoutError:
                if not deadline.expired():  # an UnavailableError is one too
                    raise
                failure = f"the evaluation of version {version} took longer than eval_hold = {limit:g} s"
            await self._settle(version, failure)
        finally:
            self._fleet.held = None
            self._ended()

    async def _settle(self, version: int, failure: str | None) -> None:
        if failure is not None:
            _log.warning("%s", failure)
            await self._run.emit({"kind": "eval_failed", "version": version, "text": failure})
        self._done.add(version)
        await self._log.set_evaluated(version)
