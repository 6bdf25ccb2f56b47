"""An engine of the training service without torch, for tests of everything around it.

Invariant: a model's weights are a digest of every request that changed it, in order. They prove what was executed, how often and in which
order, and a replay must produce the same bytes. Log-probabilities are a function of the weights and of the tokens up to each.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.service.batch import Batch, FloatArray
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import AdamSettings
from polyreme_trainer.service.states import States
from polyreme_trainer.service.tenant_engine import GRADIENT, TenantState

WEIGHT = "weight"
"""The one tensor of a model's files, U8 [32]."""
_WEIGHTS, _MOMENTS = f"weights/{WEIGHT}", f"exp_avg/{WEIGHT}"
_NOTHING = bytes(32)


class SimulatedTenantEngine:
    """A simulated `TenantEngine`.

    Args:
        vocab_size, longest: bounds of token ids and of tokens of a sequence.

    Attributes:
        executed: the calls that changed a model.
    """

    def __init__(self, vocab_size: int, longest: int) -> None:
        self._vocab_size, self._longest = vocab_size, longest
        self.lora: LoraConfig | None = None
        self.steps = 0
        self.executed: list[str] = []
        self._weights = self._moments = self._gradient = _NOTHING

    def create(self, lora: LoraConfig | None, seed: int) -> None:
        self.executed.append("create")
        self.lora, self.steps, self._gradient, self._moments = lora, 0, _NOTHING, _NOTHING
        self._weights = _digest(b"create", repr(lora).encode(), str(seed).encode())

    def take(self) -> TenantState:
        tensors: dict[str, Any] = {_WEIGHTS: _array(self._weights), _MOMENTS: _array(self._moments)}
        if self._gradient != _NOTHING:
            tensors[f"{GRADIENT}/{WEIGHT}"] = _array(self._gradient)
        return TenantState(self.lora, self.steps, tensors)

    def put(self, state: TenantState) -> None:
        self.executed.append("put")
        tensors: Any = state.tensors
        self.lora, self.steps, self._weights = state.lora, state.steps, tensors[_WEIGHTS].tobytes()
        self._moments = tensors[_MOMENTS].tobytes() if _MOMENTS in tensors else _NOTHING
        kept = f"{GRADIENT}/{WEIGHT}"
        self._gradient = tensors[kept].tobytes() if kept in tensors else _NOTHING

    def forward(self, batch: Batch, loss: str, options: Mapping[str, float]) -> tuple[Sequence[FloatArray], float]:
        for ids in (*batch.inputs, *batch.targets):
            if len(ids) > self._longest or ids.min() < 0 or ids.max() >= self._vocab_size:
                raise TenantError(f"expected at most {self._longest} token ids below {self._vocab_size}; found others")
        found = [_logprobs(self._weights, ids, targets) for ids, targets in zip(batch.inputs, batch.targets, strict=True)]
        return found, float(-sum(float(values.sum()) for values in found))

    def forward_backward(self, batch: Batch, loss: str, options: Mapping[str, float]) -> tuple[Sequence[FloatArray], float]:
        self.executed.append("forward_backward")
        result = self.forward(batch, loss, options)
        arrays: list[NDArray[np.generic]] = [
            *batch.inputs,
            *batch.targets,
            *(batch.columns[name] for name in sorted(batch.columns)),
        ]
        given = [loss.encode(), repr(sorted(options.items())).encode(), *(array.tobytes() for array in arrays)]
        self._gradient = _digest(self._gradient, self._weights, *given)
        return result

    def optim_step(self, given: AdamSettings) -> tuple[float, int]:
        self.executed.append("optim_step")
        self._moments = _digest(self._moments, self._gradient, repr(given).encode())
        self._weights, self._gradient, self.steps = _digest(self._weights, self._moments), _NOTHING, self.steps + 1
        return float(self._moments[0]), self.steps

    def write_sampler_weights(self, folder: Path) -> None:
        save_file({WEIGHT: _array(self._weights)}, folder / "model.safetensors")


class SimulatedStates(States):
    """`States` whose tensors are arrays."""

    def _write_tensors(self, path: Path, tensors: Any) -> None:
        save_file(dict(tensors), path)

    def _read_tensors(self, path: Path) -> Any:
        return load_file(path)


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
