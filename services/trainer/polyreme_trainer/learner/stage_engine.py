"""The protocol of a training engine, as the loop of a stage uses it. No torch here.

Invariant: every rank calls the same methods in the same order, so an engine may use collectives in any of them.
"""

from collections.abc import Iterable, Mapping, Sequence
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

    def measure(self, rows: StageRows, size: int) -> Sums:
        """The metrics of rows without training on them; the same on every rank.

        Args:
            size: the number of rows that are in memory at a time. No metric depends on it.
        """
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


def mismatched(rows: StageRows, chosen: Iterable[int], longest: int) -> StageRows:
    """Pairs the prompt of each row `chosen` with the answer of the row after it (the last prompt with the first answer), cut to `longest`
    tokens.

    From these mismatched pairs, KTO estimates the KL of the policy to the reference.
    """
    ids: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.uint8]] = []
    for row in chosen:
        other = (row + 1) % len(rows)
        start, of_other = (int(np.argmax(rows.loss_mask[each])) for each in (row, other))
        ids.append(np.concatenate([rows.ids[row][:start], rows.ids[other][of_other:]])[:longest])
        masks.append((np.arange(len(ids[-1])) >= start).astype(np.uint8))
    return StageRows(ids, masks)
