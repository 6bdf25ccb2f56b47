"""What the control loop needs of a training engine: load, train, write, save, compare. No torch here.

Invariant: every rank of a learner calls the same methods in the same order, so an engine may use collectives in any of them.
The megatron engine and the simulated one implement this protocol, and pass the same runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyreme.config.trainer import SftPhase
from polyreme.experience.records import GroupRecord, decode_group
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import Manifest
from polyreme_trainer.learner.gates import Answer, Gate

IterationMetrics = Mapping[str, Any]
"""Metric name to number; None where a metric was not measured."""


@dataclass(frozen=True)
class PlannedBatch:
    """The groups that one iteration trains on, in the order of its plan.

    Attributes:
        iteration: its number; the policy that is trained has version `iteration - 1`.
        indices: of the groups in the experience log.
        payloads: the groups as the log holds them.
    """

    iteration: int
    indices: tuple[int, ...]
    payloads: tuple[bytes, ...]

    @cached_property
    def groups(self) -> list[GroupRecord]:
        """The payloads, decoded."""
        return [decode_group(payload) for payload in self.payloads]


@dataclass(frozen=True)
class Written:
    """A version in a slot of the host's arena.

    Attributes:
        manifest: sealed; None on ranks other than 0.
        slot: its number in the arena.
        generation: the slot's generation word, which changes when another version is written there; 0 on ranks other than 0.
    """

    manifest: Manifest | None
    slot: int
    generation: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk.

    Attributes:
        path: its directory.
        hf_path: the Hugging Face directory of the same version.
        oldest: the oldest version that still has a checkpoint.
    """

    path: Path
    hf_path: Path
    oldest: int


class TrainEngine(Protocol):
    """The models of a run on this rank, and what happens to them."""

    @property
    def newest_save(self) -> int | None:
        """The version of the newest checkpoint; None when there is none."""
        ...

    @property
    def arena(self) -> Arena:
        """This host's arena. On rank 0."""
        ...

    def load(self) -> int | None:
        """Restores the newest intact checkpoint. Returns its version; None when the run has no checkpoint yet.

        Raises:
            ConfigError: there are checkpoints, and none can be used.
        """
        ...

    def begin_phase(self, phase: SftPhase) -> None:
        """Gives the actor the optimizer of a supervised phase."""
        ...

    def supervised_step(
        self, ids: Sequence[NDArray[np.int32]], loss_mask: Sequence[NDArray[np.uint8]], lr: float
    ) -> Callable[[], float]:
        """One optimizer step on the token mean of the rows' cross entropy.

        Args:
            ids: int32 [length] each.
            loss_mask: uint8 [length] each, 1 where the token is trained on.

        Returns:
            What computes the step's loss, when it is wanted: it may wait for the device and for other ranks. Collective.
        """
        ...

    def begin_iterations(self) -> None:
        """Gives the actor the optimizer of the iterations, after the supervised phases."""
        ...

    def save_warm_start(self, step: int, facts: Mapping[str, Any]) -> None:
        """Writes a checkpoint between two supervised steps; `step` counts those done in all phases."""
        ...

    def load_warm_start(self) -> Mapping[str, Any] | None:
        """Restores the newest intact checkpoint of a warm start. Returns its facts; None when there is none."""
        ...

    def train(self, batch: PlannedBatch) -> IterationMetrics:
        """Trains one iteration. Returns its metrics, the same on every rank; `trained_samples` and `actor/lr` among them."""
        ...

    def write(self, slot: int, version: int, term: int) -> Written:
        """Puts the actor's weights into a free slot as `version`."""
        ...

    def save(self, written: Written, version: int, facts: Mapping[str, Any]) -> Saved:
        """Writes a checkpoint and a Hugging Face directory of `version`, the newest version that was written.

        Args:
            facts: JSON values for the checkpoint; those of rank 0 count.
        """
        ...

    def hf_path(self, version: int) -> Path:
        """Where the Hugging Face directory of `version` is."""
        ...

    def compare_hf(self, path: Path) -> Sequence[Gate]:
        """Compares the actor with a Hugging Face directory that should hold the same weights; empty on ranks other than 0."""
        ...

    def compare_answers(self, greedy: Sequence[Answer], sampled: Sequence[Answer]) -> Sequence[Gate]:
        """Compares answers of replicas that serve the newest version with this engine's models; empty on ranks other than 0."""
        ...

    @property
    def compares_answers(self) -> bool:
        """Whether replicas must answer before training begins."""
        ...

    def close(self) -> None:
        """Removes the arena."""
        ...
