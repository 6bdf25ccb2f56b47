"""The warm start of a run: cross entropy of responses, phase by phase, before version 0.

Invariant: a step's rows and learning rate are functions of (seed, phase, step). A warm start is therefore the same for the same
seed, even if it was saved between two steps and continued. This module imports no torch: the engine runs the steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from polyreme.config.data import Sources
from polyreme.config.run import RunConfig
from polyreme.config.trainer import SftPhase
from polyreme.experience.metric_records import MetricRecord, WarmStartSaved, WarmStartStep
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.supervised import load_examples
from polyreme_trainer.data.template import Template
from polyreme_trainer.data.token_store import TokenStore
from polyreme_trainer.learner.engine import RowsLoss, Saved, StepEngine, TrainEngine
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.saving import Saving
from polyreme_trainer.stages.share_rows import share_rows
from polyreme_trainer.stages.steps import StepPlan, train_steps
from polyreme_trainer.stages.table import cross_entropy

FLOOR = 0.02
"""The learning rate at the cooldown's end, as a fraction of the phase's rate."""
REPORT_EVERY = 10
REPORT_SECONDS = 5.0
"""After these a step is reported in any case: only a report asks whether the run drains, and whether a save is due."""

Report = Callable[[MetricRecord], bool]
"""Takes a progress record. Returns whether the run drains, the same on every rank."""

Due = Callable[[float], bool]


def warm_start(engine: TrainEngine, config: RunConfig, files: Mapping[str, bytes], ranks: Ranks, report: Report) -> bool:
    """Runs the phases of `trainer.sft`, each with its own optimizer. A saved warm start continues from its saved step.

    The state is saved when the run drains, when `trainer.save_minutes` have passed, and after each phase except the last, whose
    result the caller saves. Training continues while it is written. On return, every save is complete.

    Returns:
        Whether all phases are complete; False when the run drains.
    """

    def due(seconds: float) -> bool:
        return ranks.agree(lambda: seconds >= REPORT_SECONDS)

    phases = config.trainer.sft
    saving = Saving(engine.finish_save, partial(_report_save, report))
    saved = engine.load_warm_start() if phases else None
    first, done = (0, 0) if saved is None else (saved["phase"], saved["step"])
    for number, phase in enumerate(phases[first:], start=first):
        rows = share_rows(ranks, partial(read_examples, phase.data, config, files))
        if done == 0:
            engine.begin_phase(phase)
        for record in run_phase(engine, phase, rows, config.seed, number, done, due):
            saving.finish(wait=False)
            drains = report(record)
            late = ranks.agree(lambda: saving.is_late(config.trainer.save_seconds))
            ends_phase = record.step == phase.steps
            if (ends_phase and number + 1 < len(phases)) or (not ends_phase and (drains or late)):
                saving.start(partial(_save, engine, phases, number, record.step))
            if drains and not ends_phase:
                saving.finish(wait=True)
                return False
        done = 0
    saving.finish(wait=True)
    return True


def run_phase(
    engine: StepEngine, phase: SftPhase, rows: StageRows, seed: int, number: int = 0, done: int = 0, due: Due = lambda _: False
) -> Iterator[WarmStartStep]:
    """Takes the phase's optimizer steps after the first `done`. A step's loss is the token mean of its responses' cross entropy.

    Args:
        number: the phase's, from 0; a record counts it from 1.
        due: whether there must be a record so many seconds after the newest one, the same on every rank.

    Yields:
        A record after every `REPORT_EVERY` steps, when one is due, and after the last. Its tokens_per_second has no padding.
    """
    loss, tokens, since = RowsLoss(cross_entropy()), 0, time.perf_counter()
    plan = StepPlan(phase.steps, phase.batch_size, (seed, number), partial(learning_rate, phase))
    for step in train_steps(engine, "actor", rows, plan, lambda taken: loss, done):
        tokens += step.tokens
        if step.number % REPORT_EVERY == 0 or step.number == phase.steps or due(time.perf_counter() - since):
            mean, now = engine.means(step.losses).get("loss", 0.0), time.perf_counter()
            pace = tokens / (now - since)
            yield WarmStartStep(
                phase=number + 1, step=step.number, steps=phase.steps, loss=mean, lr=step.lr, tokens_per_second=pace
            )
            tokens, since = 0, now


def learning_rate(phase: SftPhase, step: int) -> float:
    """The learning rate of step 1, 2, ...: linear warm-up, constant, linear cooldown that ends at `FLOOR` of the phase's rate."""
    factor = min(1.0, step / phase.warmup) if phase.warmup else 1.0
    if phase.cooldown:
        left = (phase.steps - step) / phase.cooldown
        factor = min(factor, FLOOR + (1 - FLOOR) * left)
    return phase.lr * factor


def read_examples(data: Sources, config: RunConfig, files: Mapping[str, bytes]) -> StageRows:
    """The tokenised rows of the warm start's data. Raises DataError."""
    store = TokenStore()
    for example in load_examples(data, config.data, Template(files, config.data), config.rollout.max_model_len):
        store.append(example.ids, example.loss_mask)
    return StageRows(*store.close())


def _save(engine: TrainEngine, phases: Sequence[SftPhase], number: int, step: int) -> None:
    """Starts to save the state after `step` steps of phase `number`."""
    total = sum(phase.steps for phase in phases[:number]) + step
    phase, done = (number + 1, 0) if step == phases[number].steps else (number, step)
    engine.save_warm_start(total, {"phase": phase, "step": done})


def _report_save(report: Report, saved: Saved, stall_seconds: float) -> None:
    record = WarmStartSaved(step=saved.number, path=str(saved.path), seconds=saved.seconds, stall_seconds=stall_seconds)
    report(record)
