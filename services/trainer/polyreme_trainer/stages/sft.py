"""Supervised training on the learner's ranks: cross entropy of responses, phase by phase.

Invariant: a step's rows and learning rate are functions of (seed, phase, step). A warm start is therefore the same for the same seed, even
if it was saved between two steps and continued. This module imports no torch: the engine runs the steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

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
from polyreme_trainer.stages.table import cross_entropy

FLOOR = 0.02
"""The learning rate at the cooldown's end, as a fraction of the phase's rate."""
REPORT_EVERY = 10

Report = Callable[[MetricRecord], bool]
"""Takes a progress record. Returns whether the run drains, the same on every rank."""


def learning_rate(phase: SftPhase, step: int) -> float:
    """The learning rate of step 0, 1, ...: linear warm-up, constant, linear cooldown that ends at `FLOOR` of the phase's rate."""
    factor = 1.0
    if phase.warmup:
        factor = min(factor, (step + 1) / phase.warmup)
    if phase.cooldown:
        left = (phase.steps - 1 - step) / phase.cooldown
        factor = min(factor, FLOOR + (1 - FLOOR) * left)
    return phase.lr * factor


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


def warm_start(engine: TrainEngine, config: RunConfig, files: Mapping[str, bytes], ranks: Ranks, report: Report) -> bool:
    """Runs the phases of `trainer.sft`, each with its own optimizer. A saved warm start continues from its saved step.

    The state is saved when the run drains, when `trainer.save_minutes` have passed, and after each phase except the last, whose result the
    caller saves. Training continues while it is written. On return, every save is complete.

    Returns:
        Whether all phases are complete; False when the run drains.
    """
    phases = config.trainer.sft
    saving = Saving(engine.finish_save, partial(_report_save, report))
    saved = engine.load_warm_start() if phases else None
    first, start = (0, 0) if saved is None else (saved["phase"], saved["step"])
    complete = True

    def save(number: int, step: int) -> None:
        """Starts to save the state after `step` steps of a phase."""
        position = (number + 1, 0) if step == phases[number].steps else (number, step)
        steps = sum(phase.steps for phase in phases[:number]) + step
        saving.start(partial(engine.save_warm_start, steps, {"phase": position[0], "step": position[1]}))

    def reported(number: int, record: WarmStartStep) -> bool:
        phase = phases[number]
        saving.finish(wait=False)
        drains = report(replace(record, phase=number + 1))
        late = ranks.agree(lambda: saving.is_late(config.trainer.save_seconds))
        if late and not drains and record.step < phase.steps:
            save(number, record.step)
        return drains

    for number, phase in enumerate(phases[first:], start=first):
        rows = share_rows(ranks, partial(read_examples, phase.data, config, files))
        if start == 0:
            engine.begin_phase(phase)
        step = run_phase(engine, phase, rows, (config.seed, number), start, partial(reported, number))
        complete = step == phase.steps
        if not complete or number + 1 < len(phases):
            save(number, step)
        if not complete:
            break
        start = 0
    saving.finish(wait=True)
    return complete


def run_phase(
    engine: StepEngine,
    phase: SftPhase,
    rows: StageRows,
    seed: Sequence[int],
    start: int,
    report: Callable[[WarmStartStep], bool],
) -> int:
    """Runs optimizer steps `start` to the phase's last. A step's loss is the token mean of the cross entropy of its rows' responses.

    Args:
        report: gets a record, of phase 0, every `REPORT_EVERY` steps and after the last. Its tokens_per_second has no padding. Returns
            whether the run drains.

    Returns:
        The number of the phase's completed steps; fewer than all when the run drains.
    """
    loss, tokens, since = RowsLoss(cross_entropy()), 0, time.perf_counter()
    for step, chosen in enumerate(batches(len(rows.ids), phase.steps, phase.batch_size, seed)):
        if step < start:
            continue
        lr = learning_rate(phase, step)
        taken = rows.take(chosen)
        metrics = engine.forward_backward("actor", taken, loss)
        engine.optim_step("actor", lr)
        tokens += sum(map(len, taken.ids))
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == phase.steps:
            now = time.perf_counter()
            mean = engine.means(metrics).get("loss", 0.0)
            record = WarmStartStep(
                phase=0, step=step + 1, steps=phase.steps, loss=mean, lr=lr, tokens_per_second=tokens / (now - since)
            )
            drains = report(record)
            tokens, since = 0, now
            if drains:
                return step + 1
    return phase.steps


def read_examples(data: Sources, config: RunConfig, files: Mapping[str, bytes]) -> StageRows:
    """The tokenised rows of the warm start's data. Raises DataError."""
    store = TokenStore()
    for example in load_examples(data, config.data, Template(files, config.data), config.rollout.max_model_len):
        store.append(example.ids, example.loss_mask)
    return StageRows(*store.close())


def _report_save(report: Report, saved: Saved, stall_seconds: float) -> None:
    seconds = {"seconds": saved.seconds, "stall_seconds": stall_seconds}
    report(WarmStartSaved(step=saved.number, path=str(saved.path), **seconds))
