"""The protocol of a training engine, as the loop of a stage uses it. No torch here.

Invariant: every rank calls the same methods in the same order, so an engine may use collectives in any of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.gates import Gate

STEP = "step"
"""The file in an export that names its step."""

Sums = Mapping[str, tuple[float, float]]
"""Metric name -> (sum, weight); the metric is sum / weight."""


class StageEngine(Protocol):
    """The model of a stage on this rank, and the operations on it."""

    def load(self) -> int:
        """Restores the newest intact checkpoint. Returns the number of its step; 0 when there is none.

        Raises:
            ConfigError: there are checkpoints, but none can be used.
        """
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the loaded checkpoint, as passed to `save`; empty without one."""
        ...

    def step(self, rows: StageRows, number: int, steps: int) -> Mapping[str, float]:
        """Optimizer step `number` of 1 .. `steps`. Returns its metrics, the same on every rank; `lr` and `grad_norm` among them."""
        ...

    def measure(self, rows: StageRows) -> Sums:
        """The metrics of rows without training on them; the same on every rank."""
        ...

    def save(self, number: int, facts: Mapping[str, Any], hf_path: Path | None) -> None:
        """Starts to write the checkpoint of step `number`.

        Requires that no other save is being written. Training may continue at once, because the state to write has been copied.

        Args:
            facts: JSON values; rank 0's are stored.
            hf_path: the Hugging Face directory in which the model is written before the checkpoint, with the file `STEP`; None: none.
        """
        ...

    def finish_save(self, wait: bool) -> Saved | None:
        """See `TrainEngine.finish_save`."""
        ...

    def export(self, path: Path) -> Sequence[Gate]:
        """Writes the model as a Hugging Face directory, loads it with transformers, and compares that model with this engine's.

        Returns:
            The comparison's outcomes; empty on ranks other than 0.
        """
        ...

    def close(self) -> None:
        """Ends a running save."""
        ...


def mismatched(rows: StageRows, longest: int) -> StageRows:
    """Pairs each row's prompt with the next row's answer (the last prompt with the first answer), cut to `longest` tokens.

    From these mismatched pairs, KTO estimates the KL of the policy to the reference.
    """
    starts = [int(np.argmax(mask)) for mask in rows.loss_mask]
    ids: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.uint8]] = []
    for row, start in enumerate(starts):
        other = (row + 1) % len(starts)
        answer = rows.ids[other][starts[other] :]
        ids.append(np.concatenate([rows.ids[row][:start], answer])[:longest])
        masks.append((np.arange(len(ids[-1])) >= start).astype(np.uint8))
    return StageRows(ids, masks)
