"""A training engine without torch that learns nothing. Tests and scale runs use it to exercise everything around the training.

Invariant: a version's bytes are digests of all plans and payloads up to it, in order. They prove what was trained, how often and
in which order, and a replay must produce the same bytes. Only the training is simulated: control loop, log, arena and publisher
are those of `polyreme train`.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from polyreme.config.run import RunConfig
from polyreme.config.trainer import SftPhase
from polyreme.experience.metric_records import MetricValues
from polyreme.experience.record_codec import TrainedSamples
from polyreme.rundir.checkpoint_manifest import CheckpointFacts, checkpoint_path, number_of, numbered
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import DeviceUse, PlannedBatch, RowsLoss, Saved, Written
from polyreme_trainer.learner.gates import Answer, Gate
from polyreme_trainer.megatron.atomic import discard, new_directory

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.metrics import Metrics

LAYOUT = plan_manifest([TensorSpec("weight", "U8", (64,))])


@dataclass(frozen=True)
class Weights:
    """The weights after `version` iterations: SHA-256 chains over their plans and over the groups' bytes."""

    version: int = 0
    plans: bytes = bytes(32)
    payloads: bytes = bytes(32)

    def trained_on(self, batch: PlannedBatch) -> "Weights":
        """The weights after the batch's iteration."""
        groups = hashlib.sha256(self.payloads)
        for payload in batch.payloads:
            groups.update(hashlib.sha256(payload).digest())
        return Weights(batch.iteration, after_plan(self.plans, batch.iteration, batch.indices), groups.digest())


def after_plan(before: bytes, iteration: int, indices: Sequence[int]) -> bytes:
    """The chain over plans, extended by one plan."""
    return hashlib.sha256(before + f"{iteration}: {tuple(indices)}".encode()).digest()


@dataclass(frozen=True)
class PendingSave:
    """A save that has not been written yet. polled: whether the learner has already polled it."""

    path: Path
    weights: Weights
    facts: dict[str, object]
    polled: bool = False


class SimulatedTrainEngine:
    """The engine of a learner with one rank.

    Args:
        config: the run's configuration.
        run_id: names the arena.
        train_seconds: duration of an iteration's training.
        weight_bytes: size of a version: its digests followed by zeros.
    """

    def __init__(self, config: RunConfig, run_id: str, train_seconds: float, weight_bytes: int) -> None:
        self._config, self._run_id, self._train_seconds = config, run_id, train_seconds
        self._weights = Weights()
        self._checkpoints = config.run_dir / "checkpoints"
        self._layout = plan_manifest([TensorSpec("weight", "U8", (weight_bytes,))])
        self.arena, self.longest = Arena.create(run_id, weight_bytes), config.rollout.max_model_len
        self.newest_save: int | None = None
        self._pending: PendingSave | None = None
        self.trained_samples: TrainedSamples | None = None
        self.facts: CheckpointFacts = {}

    def load(self) -> int | None:
        found = newest(self._checkpoints)
        if found is None:
            return None
        self._weights, self.newest_save = found, found.version
        self.facts = json.loads((self.hf_path(found.version) / "facts.json").read_text())
        return found.version

    def begin_phase(self, phase: SftPhase) -> None:
        pass

    def forward(self, role: str, rows: StageRows) -> NDArray[np.float32]:
        return np.zeros(sum(len(ids) - 1 for ids in rows.ids), dtype=np.float32)

    def forward_backward(self, role: str, rows: StageRows, loss: RowsLoss) -> "Sequence[Metrics]":
        time.sleep(self._train_seconds)
        return []

    def measure(self, role: str, rows: StageRows, loss: RowsLoss) -> "Sequence[Metrics]":
        return []

    def means(self, metrics: Sequence[object]) -> Mapping[str, float]:
        return {}

    def optim_step(self, role: str, lr: float) -> Mapping[str, float]:
        return {"grad_norm": 0.0, "lr": lr}

    def begin_iterations(self) -> None:
        pass

    def mix_in(self, rows: StageRows) -> None:
        pass

    def save_warm_start(self, step: int, facts: Mapping[str, int]) -> None:
        self._begin(checkpoint_path(self._checkpoints, step, "warm-start"), facts)

    def load_warm_start(self) -> Mapping[str, int] | None:
        found = numbered(self._checkpoints, "warm-start")
        return json.loads((found[-1] / "facts.json").read_text()) if found else None

    def train(self, batch: PlannedBatch) -> MetricValues:
        began = time.time()
        time.sleep(self._train_seconds)
        used = f"{began} {time.time()}"  # Unix times between which it needed its devices
        self._weights = self._weights.trained_on(batch)
        self.trained_samples = centred(batch)
        samples = sum(len(group.samples) for group in batch.groups)
        weights = (self._weights.plans + self._weights.payloads).hex()
        return {
            "weights": weights,
            "devices_used": used,
            "trained_samples": samples,
            "actor/lr": self._config.trainer.optimizer.lr,
        }

    def write(self, slot: int, version: int, term: int) -> Written:
        self.arena.begin(slot)
        view = self.arena.slot_view(slot)
        digests = self._weights.plans + self._weights.payloads
        tensor_views(LAYOUT, view)["weight"][:] = np.frombuffer(digests, np.uint8)
        sealed = seal(self._layout.stamped(self._run_id, term, version), view)
        return Written(sealed, slot, self.arena.complete(slot, version, term))

    def save(self, written: Written, version: int, facts: CheckpointFacts) -> None:
        self._begin(self.hf_path(version), facts)

    def _begin(self, path: Path, facts: CheckpointFacts) -> None:
        assert self._pending is None, "one save at a time"
        self._pending = PendingSave(path, self._weights, dict(facts))

    def finish_save(self, wait: bool) -> Saved | None:
        """Writes the save that was begun: at once if `wait`, else at the second call, so an iteration is trained meanwhile."""
        pending = self._pending
        if pending is None or not (wait or pending.polled):
            self._pending = pending and replace(pending, polled=True)
            return None
        began, path, weights = time.perf_counter(), pending.path, pending.weights
        with new_directory(path) as folder:
            state = {"version": weights.version, "plans": weights.plans.hex(), "payloads": weights.payloads.hex()}
            (folder / "state.json").write_text(json.dumps(state))
            (folder / "facts.json").write_text(json.dumps(pending.facts))
        there = numbered(self._checkpoints, path.name.rpartition("-")[0])
        kept = there[-self._config.trainer.keep_checkpoints :]
        for old in there[: -len(kept)]:
            discard(old)
        self._pending, number = None, number_of(path)
        versioned = path == self.hf_path(number)
        if versioned:
            self.newest_save = number
        return Saved(number, path, path if versioned else None, number_of(kept[0]), time.perf_counter() - began)

    def hf_path(self, version: int) -> Path:
        return checkpoint_path(self._checkpoints, version)

    def compare_hf(self, path: Path) -> Sequence[Gate]:
        return []

    def compare_answers(self, greedy: Sequence[Answer], sampled: Sequence[Answer]) -> Sequence[Gate]:
        return []

    compares_answers = False

    def leave_device(self) -> DeviceUse:
        return DeviceUse(0, 0)

    def return_to_device(self) -> None:
        pass

    def close(self) -> None:
        self.arena.close()


def centred(batch: PlannedBatch) -> TrainedSamples:
    """The trained samples of a run without a model: advantages relative to the group's mean score, and equal weights."""
    samples = [(group, sample) for group in batch.groups for sample in group.samples]
    parts = [np.full(sample.sampled_tokens, sample.score - group.mean_reward, dtype=np.float32) for group, sample in samples]
    count = len(samples)
    return TrainedSamples(np.concatenate(parts), np.full(count, 1 / count, dtype=np.float32), np.ones((count, 1), dtype=np.int32))


def newest(checkpoints: Path) -> Weights | None:
    """The weights in the newest checkpoint; None without a checkpoint."""
    found = sorted(checkpoints.glob("iteration-*/state.json"))
    if not found:
        return None
    state = json.loads(found[-1].read_text())
    return Weights(state["version"], bytes.fromhex(state["plans"]), bytes.fromhex(state["payloads"]))
