"""The loop of every stage: batches of rows, one optimizer step each, evaluations, checkpoints, and the export at the end.

Invariant: which rows a step takes is a function of (seed, step), and a checkpoint follows the evaluation of its step; so a stage that is
killed at any point and restarted ends with the same weights and records. A stage that returns has no unfinished save. This module imports
no torch: the engine runs the steps.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polyreme.config.data import Sources
from polyreme.config.stage import StageConfig, StageTrainer
from polyreme.experience.metric_records import CheckpointSaved, MetricRecord, Resumed, StageDone, StageEvaluation, StageStep
from polyreme_trainer.data.stage_rows import StageRows, mismatched
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.engine import STEP, RowsLoss, Saved, StageEngine
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.learning_rate import learning_rate
from polyreme_trainer.learner.saving import Saving
from polyreme_trainer.observe.best_export import BEST, link_export
from polyreme_trainer.stages.sft import batches
from polyreme_trainer.stages.share_rows import share_rows
from polyreme_trainer.stages.table import Stage

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.objective import Objective

HF, FINAL = "hf", "final"
"""The run directory's folder of exports, and the trained model's directory there."""

logger = logging.getLogger(__name__)

Emit = Callable[[MetricRecord], Awaitable[None]]
"""Takes a record. On rank 0."""


@dataclass(frozen=True)
class Best:
    """The saved step with the lowest held-out loss.

    Attributes:
        step, loss: the step, and its loss.
        held_out: digest of the held-out rows. The losses of other rows are not comparable.
    """

    step: int
    loss: float
    held_out: str


class StageLoop:
    """One rank of a stage.

    Args:
        config, template: the stage's configuration and template.
        stage: reads the stage's rows.
        objective: the loss to minimise.
        engine: this rank's models.
        ranks: the ranks of the stage.
        emit: takes records.
        drains: whether the stage was asked to stop. Both are called on rank 0.
    """

    def __init__(
        self,
        config: StageConfig,
        template: Template,
        stage: Stage,
        objective: "Objective",
        engine: StageEngine,
        ranks: Ranks,
        emit: Emit,
        drains: Callable[[], bool],
    ) -> None:
        self.config, self.template, self.stage, self.objective = config, template, stage, objective
        self.engine, self.ranks, self.emit, self.drains = engine, ranks, emit, drains
        self.saving = Saving(engine.finish_save, self.report_save)
        self.held_out: StageRows | None = None
        self.held_out_digest = ""
        self.best: Best | None = None

    def run(self) -> bool:
        """Trains to the last step, or until the stage drains, and saves the result in both cases. Returns whether the stage is complete.

        Raises:
            PolyremeError: the stage cannot continue, with the reason.
        """
        data = self.config.data
        rows = self.rows(data.train)
        self.held_out = None if data.eval is None else self.rows(data.eval)
        self.held_out_digest = "" if self.held_out is None else self.held_out.digest()
        done = saved = self.engine.load()
        self.best = self.loaded_best()
        steps = total_steps(len(rows), self.config.trainer)
        if done == 0:
            self.evaluate(0)
        elif done < steps:
            self.report(Resumed(step=done))
        for number, chosen in enumerate(batches(len(rows), steps, self.config.trainer.batch_size, (self.config.seed,)), start=1):
            if number <= done:
                continue
            self.saving.finish(wait=False)
            drains = self.train(number, steps, rows.take(chosen))
            loss = None
            if number == steps or is_due(number, self.config.trainer.eval_interval):
                loss = self.evaluate(number)
            if number == steps or drains or self.saving.is_due(number, self.config.trainer, self.ranks):
                self.save(number, loss, last=number == steps)
                saved = number
            if drains and number < steps:
                self.saving.finish(wait=True)
                return False
        self.saving.finish(wait=True)
        self.export(saved)
        return True

    def rows(self, sources: Sources) -> StageRows:
        """The rows of the data on every rank. Rank 0 reads them."""
        return share_rows(self.ranks, lambda: self.stage.read(sources, self.config, self.template, None))

    def train(self, number: int, steps: int, rows: StageRows) -> bool:
        """One optimizer step. Returns, the same on every rank, whether the stage drains."""
        began = time.perf_counter()
        found = self.engine.forward_backward("model", rows, self.loss(rows, self.baseline(rows)))
        moved = self.engine.optim_step("model", learning_rate(self.config.trainer.optimizer, number, steps))
        metrics = {**self.engine.means(found), **moved}
        seconds = time.perf_counter() - began
        tokens = sum(map(len, rows.ids))
        rates = {"time/step": seconds, "tokens_per_second": tokens / seconds}
        return self.report(StageStep(step=number, steps=steps, metrics={**metrics, **rates}))

    def evaluate(self, number: int) -> float | None:
        """Records the metrics of the held-out rows after step `number`. Returns their loss; None without such rows."""
        if (held_out := self.held_out) is None:
            return None
        began = time.perf_counter()
        baseline, found = self.baseline(held_out), list[Any]()
        for rows in in_parts(held_out, self.config.trainer.batch_size):
            found += self.engine.measure("model", rows, self.loss(rows, baseline))
        metrics = self.engine.means(found)
        self.report(StageEvaluation(step=number, rows=len(held_out), seconds=time.perf_counter() - began, metrics=metrics))
        return metrics.get("loss")

    def loss(self, rows: StageRows, baseline: float) -> RowsLoss:
        """The objective on rows, with what is computed before it."""
        reference = self.engine.forward("reference", rows) if self.objective.needs_reference else None
        return RowsLoss(self.objective, reference, baseline)

    def baseline(self, rows: StageRows) -> float:
        """KTO's z: the mean log-ratio of mismatched answers over all rows, 0 or more; 0 for other objectives."""
        if not self.objective.needs_baseline:
            return 0.0
        total, size = 0.0, self.config.trainer.batch_size
        for start in range(0, len(rows), size):
            other = mismatched(rows, range(start, min(start + size, len(rows))), self.engine.longest)
            policy = self.engine.forward("model", other).astype(np.float64)
            total += float((policy - self.engine.forward("reference", other)).sum())
        return max(0.0, total / len(rows))

    def loaded_best(self) -> Best | None:
        """The best step of the loaded checkpoint; None without one, or if other rows were held out."""
        best = self.engine.facts.get("best")
        return Best(**best) if best is not None and best["held_out"] == self.held_out_digest else None

    def save(self, number: int, loss: float | None, last: bool) -> None:
        """Starts to write the checkpoint of step `number`, and with the lowest held-out loss so far also the best export.

        The export of the last step is `export`'s.
        """
        is_best = loss is not None and (self.best is None or loss < self.best.loss)
        if loss is not None and is_best:
            self.best = Best(number, loss, self.held_out_digest)
        facts = {"fingerprint": self.config.fingerprint(), "best": self.best and asdict(self.best)}
        hf_path = self.config.run_dir / HF / BEST if is_best and not last else None
        self.saving.start(partial(self.engine.save, number, facts, hf_path))

    def report_save(self, saved: Saved, stall_seconds: float) -> None:
        """Records a completed save."""
        export = None if saved.hf_path is None else str(saved.hf_path)
        record = CheckpointSaved(
            step=saved.number, path=str(saved.path), hf_path=export, seconds=saved.seconds, stall_seconds=stall_seconds
        )
        self.report(record)

    def export(self, number: int) -> None:
        """Writes the trained model as a Hugging Face directory. Raises GateError when the directory does not hold the trained weights."""
        folder = self.config.run_dir / HF
        path = folder / FINAL
        gates = self.engine.export(path)

        async def judge() -> None:
            for gate in gates:
                await self.emit(gate.record())
                gate.check()
            if self.best is not None and self.best.step == number:
                link_best(path, number)
            await self.emit(StageDone(step=number, hf_path=str(path)))

        self.ranks.on_leader(judge)

    def report(self, record: MetricRecord) -> bool:
        """Emits a record. Returns, the same on every rank, whether the stage drains."""

        async def emit() -> bytes:
            await self.emit(record)
            return bytes([self.drains()])

        return self.ranks.broadcast_from_leader(partial(emit)) == b"\x01"


def link_best(final: Path, number: int) -> None:
    """Makes the trained model the best export, without a copy of its files. Logs a failure."""
    try:
        link_export(final, final.with_name(BEST), {STEP: f"{number}\n"})
    except OSError as error:  # the file system has no hard links
        logger.warning("cannot keep %s also as %s: %s", final, BEST, error)


def in_parts(rows: StageRows, size: int) -> Iterator[StageRows]:
    """Yields `size` rows at a time, in order; the last part may have fewer. No metric depends on the size."""
    for start in range(0, len(rows), size):
        yield rows.take(np.arange(start, min(start + size, len(rows))))


def total_steps(rows: int, trainer: StageTrainer) -> int:
    """The number of optimizer steps of a stage with this number of rows."""
    return trainer.steps or max(1, math.ceil(rows * trainer.epochs / trainer.batch_size))


def is_due(number: int, interval: int) -> bool:
    """Whether an interval (0: never) ends with step `number`."""
    return interval > 0 and number % interval == 0
