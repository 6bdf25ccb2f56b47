"""The program of every stage: one optimizer step after the other, evaluations, checkpoints, and the export at the end.

Invariant: a checkpoint follows the evaluation of its step; so a stage that is killed at any point and restarted ends with the
same weights and records. A stage that returns has no unfinished save. This module imports no torch: the engine runs the steps.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from polyreme.config.stage import StageConfig, StageTrainer
from polyreme.experience.metric_records import CheckpointSaved, MetricRecord, Resumed, StageDone, StageEvaluation, StageStep
from polyreme.rundir.checkpoint_manifest import CheckpointFacts
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.engine import STEP, Engine, Saved, StageEngine
from polyreme_trainer.learner.gates import Gate
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.learning_rate import learning_rate
from polyreme_trainer.learner.saving import Saving
from polyreme_trainer.observe.best_export import BEST, link_export
from polyreme_trainer.stages.share_rows import share_rows
from polyreme_trainer.stages.steps import RowsObjective, StepPlan, TrainedStep, train_steps
from polyreme_trainer.stages.table import Stage

HF, FINAL = "hf", "final"
"""The run directory's folder of exports, and the trained model's directory there."""

logger = logging.getLogger(__name__)


def run_stage(config: StageConfig, template: Template, stage: Stage, engine: StageEngine, ranks: Ranks, log: "StageLog") -> bool:
    """Trains to the last step, or until the stage drains, and saves the result in both cases. Every rank calls it.

    Args:
        config, template: the stage's configuration and template.
        stage: reads its rows and creates its objective.
        engine: this rank's models.
        ranks, log: the ranks of the stage, and their records.

    Returns:
        Whether the stage is complete.

    Raises:
        PolyremeError: the stage cannot continue, with the reason.
    """
    trainer = config.trainer
    rows = share_rows(ranks, partial(stage.read, config.data.train, config, template, None))
    held_out = (
        None if config.data.eval is None else share_rows(ranks, partial(stage.read, config.data.eval, config, template, None))
    )
    objective = RowsObjective(engine, stage.objective(config), trainer.batch_size)
    done, steps = engine.load(), total_steps(len(rows), trainer)
    judge = None if held_out is None else f"{held_out.digest()} {objective.objective}"
    best, saving = loaded_best(engine.facts, judge), Saving(engine.finish_save, log.report_save)
    if done == 0:
        evaluate(objective, held_out, 0, log)
    elif done < steps:
        log.report(Resumed(step=done))
    plan = StepPlan(steps, trainer.batch_size, (config.seed,), lambda step: learning_rate(trainer.optimizer, step, steps))
    for step in train_steps(engine, "model", rows, plan, objective.of_step, done):
        record = step_record(engine, step, steps)
        saving.finish(wait=False)
        drains, loss, is_last = log.report(record), None, step.number == steps
        if is_last or is_due(step.number, trainer.eval_interval):
            loss = evaluate(objective, held_out, step.number, log)
        if is_last or drains or saving.is_due(step.number, trainer, ranks):
            before, best = best, lower(best, step.number, loss, judge)
            facts = {"fingerprint": config.fingerprint(), "best": best and asdict(best)}
            hf_path = None if is_last or best is before else config.run_dir / HF / BEST  # `export` writes the last step
            saving.start(partial(engine.save, step.number, facts, hf_path))
        if drains and not is_last:
            saving.finish(wait=True)
            return False
    saving.finish(wait=True)
    export(engine, config.run_dir / HF / FINAL, max(done, steps), best, log)
    return True


@dataclass(frozen=True)
class StageLog:
    """The records of a stage. Rank 0 writes them; every method is collective.

    Attributes:
        write: writes a record. Called on rank 0.
        drains: whether the stage was asked to stop. Called on rank 0.
    """

    ranks: Ranks
    write: Callable[[MetricRecord], None]
    drains: Callable[[], bool]

    def report(self, record: MetricRecord) -> bool:
        """Writes a record. Returns, the same on every rank, whether the stage drains."""

        def written() -> bool:
            self.write(record)
            return self.drains()

        return self.ranks.agree(written)

    def report_save(self, saved: Saved, stall_seconds: float) -> None:
        """Writes the record of a completed save."""
        export = None if saved.hf_path is None else str(saved.hf_path)
        record = CheckpointSaved(
            step=saved.number, path=str(saved.path), hf_path=export, seconds=saved.seconds, stall_seconds=stall_seconds
        )
        self.report(record)

    def check(self, gates: Sequence[Gate]) -> None:
        """Writes the gates that rank 0 measured. Raises GateError (LeaderError on other ranks) at the first that failed."""

        async def write_and_check() -> None:
            for gate in gates:
                self.write(gate.record())
                gate.check()

        self.ranks.on_leader(write_and_check)


def step_record(engine: Engine, step: TrainedStep, steps: int) -> StageStep:
    """The record of a step. Waits for the device."""
    metrics = {**engine.means(step.losses), **step.moved}
    seconds = time.perf_counter() - step.began
    rates = {"time/step": seconds, "tokens_per_second": step.tokens / seconds}
    return StageStep(step=step.number, steps=steps, metrics={**metrics, **rates})


def evaluate(objective: RowsObjective, held_out: StageRows | None, number: int, log: StageLog) -> float | None:
    """Records the metrics of the held-out rows after step `number`. Returns their loss; None without such rows."""
    if held_out is None:
        return None
    began, metrics = time.perf_counter(), objective.measure(held_out)
    log.report(StageEvaluation(step=number, rows=len(held_out), seconds=time.perf_counter() - began, metrics=metrics))
    return metrics.get("loss")


@dataclass(frozen=True)
class Best:
    """The saved step with the lowest held-out loss.

    Attributes:
        step, loss: the step, and its loss.
        held_out: digest of the held-out rows, and the objective. Losses of other rows, or of another objective, are not
            comparable.
    """

    step: int
    loss: float
    held_out: str


def loaded_best(facts: CheckpointFacts, judge: str | None) -> Best | None:
    """The best step in a checkpoint's facts; None without one, or if it was judged by another loss. `judge`: see
    `Best.held_out`."""
    best = facts.get("best")
    if best is None or judge is None or not judge.startswith(best["held_out"]):  # 0.2.0 has saved the rows' digest only
        return None
    return Best(**best)


def lower(best: Best | None, number: int, loss: float | None, judge: str | None) -> Best | None:
    """The step `number` if its held-out loss is the lowest so far, else `best`."""
    if loss is None or judge is None or (best is not None and loss >= best.loss):
        return best
    return Best(number, loss, judge)


def export(engine: StageEngine, path: Path, number: int, best: Best | None, log: StageLog) -> None:
    """Writes the trained model of step `number`, its Hugging Face directory and the record of the end.

    Raises:
        GateError: the directory does not hold the trained weights.
    """
    log.check(engine.export(path))
    if log.ranks.leads and best is not None and best.step == number:
        link_best(path, number)
    log.report(StageDone(step=number, hf_path=str(path)))


def link_best(final: Path, number: int) -> None:
    """Makes the trained model the best export, without a copy of its files. Logs a failure."""
    try:
        link_export(final, final.with_name(BEST), {STEP: f"{number}\n"})
    except OSError as error:  # the file system has no hard links
        logger.warning("cannot keep %s also as %s: %s", final, BEST, error)


def total_steps(rows: int, trainer: StageTrainer) -> int:
    """The number of optimizer steps of a stage with this number of rows."""
    return trainer.steps or max(1, math.ceil(rows * trainer.epochs / trainer.batch_size))


def is_due(number: int, interval: int) -> bool:
    """Whether an interval (0: never) ends with step `number`."""
    return interval > 0 and number % interval == 0
