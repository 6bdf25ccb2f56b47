"""The protocols of a training engine: what every program uses, and what a run's control loop and a stage's loop add to it.

Invariant: every rank of a learner calls the same methods in the same order, so an engine may use collectives in any of them. This
module imports no torch. The megatron engine and the simulated engine implement the protocols.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from polyreme.config.trainer import SftPhase
from polyreme.experience.metric_records import MetricValues
from polyreme.experience.record_codec import TrainedSamples, decode_group
from polyreme.experience.records import GroupRecord
from polyreme.rundir.checkpoint_manifest import CheckpointFacts
from polyreme.weights.arena import Arena
from polyreme.weights.canary import Canary
from polyreme.weights.manifest import Manifest, RemotePart
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.gates import Answer, Gate

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.metrics import Metrics
    from polyreme_trainer.algorithms.objective import Objective


@dataclass(frozen=True)
class PlannedBatch:
    """The groups that one iteration trains on, in the order of its plan.

    Attributes:
        iteration: the iteration's number; the policy that it trains has version `iteration - 1`.
        indices: the groups' indices in the experience log.
        payloads: the groups as the log stores them.
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
    """A version in an arena slot of this host.

    Attributes:
        manifest: the sealed manifest; None on ranks other than 0.
        slot: the arena slot's number.
        generation: the slot's generation word, which changes when another version is written there; 0 on ranks other than 0.
        canary: the answer that a replica of this version must give; valid on rank 0 only. None when the engine has no model.
        parts: the parts on other machines; empty when the first machine has the whole version, and on ranks other than 0.
    """

    manifest: Manifest | None
    slot: int
    generation: int
    canary: Canary | None = None
    parts: tuple[RemotePart, ...] = ()

    @property
    def manifests(self) -> tuple[Manifest, ...]:
        """The manifest of every part. On rank 0."""
        assert self.manifest is not None
        return (self.manifest, *(part.manifest for part in self.parts))


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk: of a version, or of a step of a warm start or of a stage.

    Attributes:
        number: its version or step.
        path: the checkpoint's directory.
        hf_path: the Hugging Face directory of the same weights; None: it has none.
        oldest: the oldest version or step that still has a checkpoint; valid on rank 0 only.
        seconds: the time that rank 0 took to write it.
    """

    number: int
    path: Path
    hf_path: Path | None
    oldest: int
    seconds: float


@dataclass(frozen=True)
class DeviceUse:
    """Device memory of this rank, in bytes.

    Attributes:
        freed_bytes: memory that the rank freed when it left the device.
        peak_bytes: peak memory since the ranks took the device; on CPU, the process's peak resident size.
    """

    freed_bytes: int
    peak_bytes: int


STEP = "step"
"""The file in an export that names its step."""


@dataclass(frozen=True)
class RowsLoss:
    """A loss on rows.

    Attributes:
        objective: computes it.
        reference: float32 [t], the rows' log-probabilities under the reference, as `Engine.forward` returns them; None: unused.
        baseline: KTO's estimate of the KL to the reference.
    """

    objective: "Objective"
    reference: NDArray[np.float32] | None = None
    baseline: float = 0.0


class StepEngine(Protocol):
    """Models by the names of their roles, and what an optimizer step needs: one or more calls of `forward_backward`, whose
    gradients add up, and then one of `optim_step`. Log-probabilities of rows are those at temperature 1."""

    def forward_backward(self, role: str, rows: StageRows, loss: RowsLoss) -> "Sequence[Metrics]":
        """Adds the gradient of a loss on rows to that of the next optimizer step. Returns metrics for `means`."""

    def means(self, metrics: "Sequence[Metrics]") -> Mapping[str, float]:
        """The metrics over all ranks' parts of the rows. Waits for the device and for other ranks."""

    def optim_step(self, role: str, lr: float) -> Mapping[str, float]:
        """Changes the model's weights by the gradient. Returns metrics: `grad_norm`, `lr`, and those of routers."""


class Engine(StepEngine, Protocol):
    """Models on this rank, and the operations that every program uses.

    At most one save is being written; training continues meanwhile, because a save begins with a copy.
    """

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sequence."""

    @property
    def facts(self) -> CheckpointFacts:
        """The facts of the loaded checkpoint, as passed to `save`; empty without one."""

    def forward(self, role: str, rows: StageRows) -> NDArray[np.float32]:
        """The model's number for each token after the first, 0 where it is not trained on: float32 [t], sequence by sequence."""

    def measure(self, role: str, rows: StageRows, loss: RowsLoss) -> "Sequence[Metrics]":
        """The metrics of a loss on rows, without a gradient. For `means`."""

    def finish_save(self, wait: bool) -> Saved | None:
        """Returns each checkpoint once, when it is complete on all ranks. None while it is incomplete, or when there is none.

        Args:
            wait: return only when nothing is being written.

        Raises:
            The error that writing raised.
        """

    def close(self) -> None:
        """Ends a running save, and removes what the engine shares with other processes."""


class StageEngine(Engine, Protocol):
    """The engine of a stage: the role `model`, and the role `reference` if the stage has one."""

    def load(self) -> int:
        """Restores the newest intact checkpoint. Returns the number of its step; 0 when there is none.

        Raises:
            ConfigError: there are checkpoints, but none can be used.
        """

    def save(self, number: int, facts: CheckpointFacts, hf_path: Path | None) -> None:
        """Starts to write the checkpoint of step `number`.

        Args:
            facts: JSON values; rank 0's are stored.
            hf_path: the Hugging Face directory that is written before the checkpoint, with the file `STEP`; None: none.
        """

    def export(self, path: Path) -> Sequence[Gate]:
        """Writes the model as a Hugging Face directory, loads it with transformers, and compares that model with this engine's.

        Returns:
            The comparison's outcomes; empty on ranks other than 0.
        """


class TrainEngine(Engine, Protocol):
    """The engine of a run: the roles `actor` and `critic`, and the operations of iterations and versions."""

    @property
    def newest_save(self) -> int | None:
        """The version of the newest checkpoint; None without one."""

    @property
    def arena(self) -> Arena:
        """This host's arena; on rank 0 only."""

    def load(self) -> int | None:
        """Restores the newest intact checkpoint. Returns its version; None when the run has no checkpoint yet.

        Raises:
            ConfigError: there are checkpoints, but none can be used.
        """

    def begin_phase(self, phase: SftPhase) -> None:
        """Creates the actor's optimizer for a supervised phase."""

    def begin_iterations(self) -> None:
        """Creates the actor's optimizer for the iterations, after the supervised phases."""

    def mix_in(self, rows: StageRows) -> None:
        """Takes the rows of `algorithm.ptx`. Every later step of the actor mixes some of them in."""

    def save_warm_start(self, step: int, facts: Mapping[str, int]) -> None:
        """Starts to write a checkpoint between supervised steps; `step` counts the completed steps of all phases. As `save`."""

    def load_warm_start(self) -> Mapping[str, int] | None:
        """Restores the newest intact checkpoint of a warm start. Returns its facts; None without one."""

    def train(self, batch: PlannedBatch) -> MetricValues:
        """Trains one iteration.

        Returns:
            Its metrics, which include `trained_samples` and `actor/lr`. They are the same on every rank, except seconds.
        """

    @property
    def trained_samples(self) -> TrainedSamples | None:
        """How the newest iteration used its samples; None before the first. The same on every rank."""

    def write(self, slot: int, version: int, term: int) -> Written:
        """Writes the actor's weights into a free arena slot as `version`."""

    def save(self, written: Written, version: int, facts: CheckpointFacts) -> None:
        """Starts to write a checkpoint and a Hugging Face directory of `version`, the newest written. `facts`: JSON values."""

    def hf_path(self, version: int) -> Path:
        """The path of the Hugging Face directory of `version`."""

    def compare_hf(self, path: Path) -> Sequence[Gate]:
        """Compares the actor with a Hugging Face directory that must hold the same weights. Empty on ranks other than 0."""

    def compare_answers(self, greedy: Sequence[Answer], sampled: Sequence[Answer]) -> Sequence[Gate]:
        """Compares answers of replicas that serve the newest version with this engine's models. Empty on ranks other than 0."""

    @property
    def compares_answers(self) -> bool:
        """Whether replicas must answer before training begins."""

    def leave_device(self) -> DeviceUse:
        """Moves weights, moments and idle roles to host memory, and drops gradients. The next call must be `return_to_device`."""

    def return_to_device(self) -> None:
        """Moves everything that `leave_device` moved back to the device."""
