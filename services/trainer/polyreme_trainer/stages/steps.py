"""Optimizer steps on rows, and the losses of rows: what every program that trains on a file's rows is made of.

Invariant: a step's rows are a function of (seed, step), so a program that is killed at any point and restarted trains on the same
rows. This module imports no torch: the engine runs the steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.data.stage_rows import StageRows, mismatched
from polyreme_trainer.learner.engine import Engine, RowsLoss, StepEngine

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.metrics import Metrics
    from polyreme_trainer.algorithms.objective import Objective


@dataclass(frozen=True)
class StepPlan:
    """The optimizer steps of a program.

    Attributes:
        steps: their number.
        batch_size: rows of each step.
        seed: of the order of the rows.
        rate: the learning rate of step 1, 2, ...
    """

    steps: int
    batch_size: int
    seed: Sequence[int]
    rate: Callable[[int], float]


@dataclass(frozen=True)
class TrainedStep:
    """An optimizer step that was taken; the device may still compute it.

    Attributes:
        number: from 1.
        lr: its learning rate.
        tokens: tokens of its rows, without padding.
        began: when it began, as `time.perf_counter` tells.
        losses: the loss's metrics, for `Engine.means`.
        moved: metrics of the change of the weights.
    """

    number: int
    lr: float
    tokens: int
    began: float
    losses: "Sequence[Metrics]"
    moved: Mapping[str, float]


def train_steps(
    engine: StepEngine, role: str, rows: StageRows, plan: StepPlan, loss: Callable[[StageRows], RowsLoss], done: int = 0
) -> Iterator[TrainedStep]:
    """Takes the plan's steps after the first `done`, and yields each. Between two steps, the caller may evaluate, save or stop.

    Args:
        loss: the loss on the rows of a step.
    """
    remaining = islice(batches(len(rows), plan.steps, plan.batch_size, plan.seed), done, None)
    for number, chosen in enumerate(remaining, start=done + 1):
        began, taken, lr = time.perf_counter(), rows.take(chosen), plan.rate(number)
        losses = engine.forward_backward(role, taken, loss(taken))
        moved = engine.optim_step(role, lr)
        yield TrainedStep(number, lr, sum(map(len, taken.ids)), began, losses, moved)


def batches(rows: int, steps: int, size: int, seed: Sequence[int]) -> Iterator[NDArray[np.int64]]:
    """Yields the row numbers of each step, int64 [size]. Each pass over all rows has an order drawn from (seed, pass)."""
    waiting = np.empty(0, dtype=np.int64)
    number = 0
    for _ in range(steps):
        while len(waiting) < size:
            waiting = np.concatenate([waiting, np.random.default_rng([*seed, number]).permutation(rows)])
            number += 1
        yield waiting[:size]
        waiting = waiting[size:]


@dataclass(frozen=True)
class RowsObjective:
    """An objective for the role `model` of an engine, with what it compares with: the role `reference`, and a baseline.

    Attributes:
        batch_size: how many rows are computed at a time. No number depends on it.
    """

    engine: Engine
    objective: "Objective"
    batch_size: int

    def of_step(self, rows: StageRows) -> RowsLoss:
        """The loss on the rows of a step."""
        return self._loss(rows, self.baseline(rows))

    def measure(self, rows: StageRows) -> Mapping[str, float]:
        """The metrics of the objective on all rows, without a gradient."""
        baseline, parts = self.baseline(rows), in_parts(rows, self.batch_size)
        measured = [self.engine.measure("model", part, self._loss(part, baseline)) for part in parts]
        return self.engine.means([metrics for part in measured for metrics in part])

    def baseline(self, rows: StageRows) -> float:
        """KTO's z: the mean log-ratio of mismatched answers over all rows, 0 or more; 0 for other objectives."""
        if not self.objective.needs_baseline:
            return 0.0
        total, size = 0.0, self.batch_size
        for start in range(0, len(rows), size):
            other = mismatched(rows, range(start, min(start + size, len(rows))), self.engine.longest)
            policy = self.engine.forward("model", other).astype(np.float64)
            total += float((policy - self.engine.forward("reference", other)).sum())
        return max(0.0, total / len(rows))

    def _loss(self, rows: StageRows, baseline: float) -> RowsLoss:
        reference = self.engine.forward("reference", rows) if self.objective.needs_reference else None
        return RowsLoss(self.objective, reference, baseline)


def in_parts(rows: StageRows, size: int) -> Iterator[StageRows]:
    """Yields `size` rows at a time, in order; the last part may have fewer."""
    for start in range(0, len(rows), size):
        yield rows.take(np.arange(start, min(start + size, len(rows))))
