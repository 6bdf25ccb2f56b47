"""The loop of every stage: batches of rows, one optimizer step each, evaluations, checkpoints, and the export at the end.

Invariant: which rows a step takes is a function of (seed, step), and a checkpoint follows the evaluation of its step; so a stage that is
killed at any point and restarted ends with the same weights and records. This module imports no torch: the engine runs the steps.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.config.data import Sources
from polyreme.config.stage import StageConfig, StageTrainer
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.learner.stage_engine import StageEngine
from polyreme_trainer.stages.sft import batches
from polyreme_trainer.stages.share_rows import share_rows
from polyreme_trainer.stages.stage import Read

EXPORT = Path("hf", "final")
"""The path of the trained model in the run directory."""

Emit = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Takes a record. On rank 0."""


class StageLoop:
    """One rank of a stage.

    Args:
        config, template: the stage's configuration and template.
        read: reads the stage's rows.
        engine: this rank's model.
        ranks: the ranks of the stage.
        emit: takes records.
        drains: whether the stage was asked to stop. Both are called on rank 0.
    """

    def __init__(
        self,
        config: StageConfig,
        template: Template,
        read: Read,
        engine: StageEngine,
        ranks: Ranks,
        emit: Emit,
        drains: Callable[[], bool],
    ) -> None:
        self.config, self.template, self.read = config, template, read
        self.engine, self.ranks, self.emit, self.drains = engine, ranks, emit, drains

    def run(self) -> bool:
        """Trains to the last step, or until the stage drains, and saves the result in both cases. Returns whether the stage is complete.

        Raises:
            PolyremeError: the stage cannot continue, with the reason.
        """
        data = self.config.data
        rows = self.rows(data.train)
        held_out = None if data.eval is None else self.rows(data.eval)
        done = saved = self.engine.load()
        steps = total_steps(len(rows), self.config.trainer)
        if done == 0:
            self.evaluate(0, held_out)
        for number, chosen in enumerate(batches(len(rows), steps, self.config.trainer.batch_size, (self.config.seed,)), start=1):
            if number <= done:
                continue
            drains = self.train(number, steps, rows.take(chosen))
            if number == steps or is_due(number, self.config.trainer.eval_interval):
                self.evaluate(number, held_out)
            if number == steps or drains or is_due(number, self.config.trainer.save_interval):
                self.save(number)
                saved = number
            if drains and number < steps:
                return False
        self.export(saved)
        return True

    def rows(self, sources: Sources) -> StageRows:
        """The rows of the data on every rank. Rank 0 reads them."""
        return share_rows(self.ranks, lambda: self.read(sources, self.config, self.template, None))

    def train(self, number: int, steps: int, rows: StageRows) -> bool:
        """One optimizer step. Returns, the same on every rank, whether the stage drains."""
        began = time.perf_counter()
        metrics = self.engine.step(rows, number, steps)
        seconds = time.perf_counter() - began
        tokens = sum(map(len, rows.ids))
        rates = {"time/step": seconds, "tokens_per_second": tokens / seconds}
        return self.report({"kind": "step", "step": number, "steps": steps, **metrics, **rates})

    def evaluate(self, number: int, held_out: StageRows | None) -> None:
        """Records the metrics of the held-out rows after step `number`, if there are held-out rows."""
        if held_out is None:
            return
        began, size = time.perf_counter(), self.config.trainer.batch_size
        totals: dict[str, tuple[float, float]] = {}
        for start in range(0, len(held_out), size):
            part = self.engine.measure(held_out.take(np.arange(start, min(start + size, len(held_out)))))
            for name, (value, weight) in part.items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + value, before[1] + weight
        metrics = {name: value / weight for name, (value, weight) in totals.items() if weight}
        self.report({"kind": "eval", "step": number, "rows": len(held_out), "seconds": time.perf_counter() - began, **metrics})

    def save(self, number: int) -> None:
        """Writes the checkpoint of step `number`."""
        began = time.perf_counter()
        path = self.engine.save(number, {"fingerprint": self.config.fingerprint()})
        self.report({"kind": "saved", "step": number, "path": str(path), "seconds": time.perf_counter() - began})

    def export(self, number: int) -> None:
        """Writes the trained model as a Hugging Face directory. Raises GateError when the directory does not hold the trained weights."""
        path = self.config.run_dir / EXPORT
        gates = self.engine.export(path)

        async def judge() -> None:
            for gate in gates:
                await self.emit(gate.record())
                gate.check()
            await self.emit({"kind": "done", "step": number, "hf_path": str(path)})

        self.ranks.on_leader(judge)

    def report(self, record: Mapping[str, Any]) -> bool:
        """Emits a record. Returns, the same on every rank, whether the stage drains."""

        async def emit() -> bytes:
            await self.emit(record)
            return bytes([self.drains()])

        return self.ranks.broadcast_from_leader(partial(emit)) == b"\x01"


def total_steps(rows: int, trainer: StageTrainer) -> int:
    """The number of optimizer steps of a stage with this number of rows."""
    return trainer.steps or max(1, math.ceil(rows * trainer.epochs / trainer.batch_size))


def is_due(number: int, interval: int) -> bool:
    """Whether an interval (0: never) ends with step `number`."""
    return interval > 0 and number % interval == 0
