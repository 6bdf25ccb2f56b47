"""An engine of the training service without torch, for tests of everything around it.

Invariant: a model's weights are a digest of every request that changed it, in order. They prove what was executed, how often and
in which order, and a replay must produce the same bytes. Log-probabilities are a function of weights and the tokens up to each.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.service.batch import Batch, BatchResult, FloatArray, LossCall
from polyreme_trainer.service.errors import CHECKPOINT_LOST, ModelLostError, TenantError
from polyreme_trainer.service.messages import AdamSettings

WEIGHT = "weight"
"""The one tensor of a model's files, U8 [32]."""
LARGEST_RATE = 1e30
"""A step with a larger learning rate spoils a model."""
_WEIGHTS, _MOMENTS, _GRADIENT, _STATE = "weights", "moments", "gradient", "state.safetensors"
_NOTHING = bytes(32)


@dataclass(frozen=True)
class _Model:
    """A model's digests."""

    lora: LoraConfig | None
    weights: bytes
    steps: int = 0
    moments: bytes = _NOTHING
    gradient: bytes = _NOTHING
    critic: bool = False


class SimulatedTenantEngine:
    """A simulated `TenantEngine`.

    Args:
        vocab_size, longest: bounds of token ids and of tokens of a sequence.

    Attributes:
        executed: the calls that changed a model.
        passes: the models of each pass.
    """

    most, pass_bytes = 8, 1 << 20

    def __init__(self, vocab_size: int, longest: int) -> None:
        self._vocab_size, self._longest = vocab_size, longest
        self.executed: list[str] = []
        self.passes: list[list[str]] = []
        self._models: dict[str, _Model] = {}

    @property
    def models(self) -> Mapping[str, LoraConfig | None]:
        return {name: model.lora for name, model in self._models.items()}

    @property
    def critics(self) -> Collection[str]:
        return {name for name, model in self._models.items() if model.critic}

    def steps(self, name: str) -> int:
        return self._models[name].steps

    def create(self, name: str, lora: LoraConfig | None, seed: int, critic: bool = False) -> None:
        self.executed.append("create")
        self._models[name] = _Model(lora, _digest(b"create", repr(lora).encode(), str(seed).encode()), critic=critic)

    def save(self, name: str, folder: Path, gradient: bool) -> None:
        model = self._models[name]
        kept = {_WEIGHTS: model.weights, _MOMENTS: model.moments} | ({_GRADIENT: model.gradient} if gradient else {})
        save_file({kind: _array(digest) for kind, digest in kept.items()}, folder / _STATE)

    def load(self, name: str, folder: Path, lora: LoraConfig | None, steps: int, critic: bool = False) -> None:
        self.executed.append("load")
        try:
            kept = {kind: array.tobytes() for kind, array in load_file(folder / _STATE).items()}
        except FileNotFoundError:
            raise ModelLostError(CHECKPOINT_LOST) from None
        moments = kept[_MOMENTS] if steps else _NOTHING
        self._models[name] = _Model(lora, kept[_WEIGHTS], steps, moments, kept.get(_GRADIENT, _NOTHING), critic)

    def remove(self, name: str) -> None:
        self._models.pop(name, None)

    def forward(self, calls: Mapping[str, LossCall]) -> dict[str, BatchResult | TenantError]:
        self.passes.append(list(calls))
        return {name: self._forward(self._models[name], call.batch) for name, call in calls.items()}

    def _forward(self, model: _Model, batch: Batch) -> BatchResult | TenantError:
        for ids in (*batch.inputs, *batch.targets):
            if len(ids) > self._longest or ids.min() < 0 or ids.max() >= self._vocab_size:
                return TenantError(f"expected at most {self._longest} token ids below {self._vocab_size}; found others")
        found = [_logprobs(model.weights, ids, targets) for ids, targets in zip(batch.inputs, batch.targets, strict=True)]
        return BatchResult(found, float(-sum(float(values.sum()) for values in found)))

    def forward_backward(self, calls: Mapping[str, LossCall]) -> dict[str, BatchResult | TenantError]:
        results = self.forward(calls)
        for name, call in calls.items():
            self.executed.append("forward_backward")
            if isinstance(results[name], TenantError):
                continue
            batch, model = call.batch, self._models[name]
            arrays: list[NDArray[np.generic]] = [*batch.inputs, *batch.targets]
            arrays += [batch.columns[column] for column in sorted(batch.columns)]
            given = [call.loss.encode(), repr(sorted(call.options.items())).encode(), *(array.tobytes() for array in arrays)]
            self._models[name] = replace(model, gradient=_digest(model.gradient, model.weights, *given))
        return results

    def optim_step(self, name: str, given: AdamSettings) -> tuple[float, int]:
        self.executed.append("optim_step")
        model = self._models[name]
        if given.learning_rate > LARGEST_RATE:
            self._models[name] = replace(model, weights=_NOTHING, moments=_NOTHING, gradient=_NOTHING)
            raise ModelLostError(
                f"expected finite weights after a step; found others at a learning rate of {given.learning_rate}"
            )
        moments = _digest(model.moments, model.gradient, repr(given).encode())
        moved = _digest(model.weights, moments)
        self._models[name] = replace(model, weights=moved, steps=model.steps + 1, moments=moments, gradient=_NOTHING)
        return float(moments[0]), model.steps + 1

    def write_sampler_weights(self, name: str, folder: Path) -> None:
        save_file({WEIGHT: _array(self._models[name].weights)}, folder / "model.safetensors")


def _digest(*parts: bytes) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()


def _array(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).copy()


def _logprobs(weights: bytes, ids: NDArray[np.int64], targets: NDArray[np.int64]) -> FloatArray:
    """One for each target, from -4 to 0."""
    state = hashlib.sha256(weights)
    values = []
    for token, target in zip(ids.tolist(), targets.tolist(), strict=True):
        state.update(f"{token} ".encode())
        here = state.copy()
        here.update(f"-> {target}".encode())
        values.append(-4.0 * int.from_bytes(here.digest()[:4], "little") / 2**32)
    return np.array(values, np.float32)
