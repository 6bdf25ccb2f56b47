"""The training service's engine: one base model, and the models of tenants that take turns on it.

Each tenant's model has its adapters, moments, gradient and count of steps. One of them is installed in the base model; the others are in the
host's memory.

Invariant: what a tenant's model computes depends on its own requests only. A model that was moved out and in again has the same bits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.config.trainer import LoraConfig
from polyreme.errors import RunFailedError
from polyreme_trainer.algorithms.service_losses import LOSSES
from polyreme_trainer.local import LocalEngine
from polyreme_trainer.megatron.batches.batch import IGNORE, FloatArray, IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.offload.fragments import MASTER, MOMENTS
from polyreme_trainer.megatron.parallel.reshard import WEIGHTS
from polyreme_trainer.megatron.training.optimizer import Adam
from polyreme_trainer.megatron.training.roles import LossTerm, every
from polyreme_trainer.service.batch import Batch
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.losses import SPECS
from polyreme_trainer.service.messages import AdamSettings
from polyreme_trainer.service.tenant_engine import GRADIENT, TenantState

_KINDS = (WEIGHTS, *MOMENTS, MASTER)


@dataclass(frozen=True)
class _BatchLoss:
    """The loss of a batch's micro-batches, with their log-probabilities as the result."""

    name: str
    options: Mapping[str, float]
    columns: Mapping[str, FloatArray]

    def __call__(self, batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, tuple[IntArray, Tensor, Tensor]]:
        inputs = {name: batch.take(values) for name, values in self.columns.items()}
        loss = LOSSES[self.name](logprobs, inputs, self.options, batch.sequence).sum()
        return loss, (batch.tokens, logprobs.detach(), loss.detach())


class ServiceEngine:
    """Computes requests, for one tenant's model after the other. `open` creates one. The methods that compute use the model installed last."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine, self._role = engine, engine.actor
        self.lora = engine.config.trainer.lora
        """The installed model's adapters; None: all parameters."""

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig) -> Iterator["ServiceEngine"]:
        """Loads the base model `model.path`. Raises as `LocalEngine.open`."""
        with LocalEngine.open(config) as engine:
            yield cls(engine)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sequence."""
        return self._role.model.arch.max_position

    @property
    def steps(self) -> int:
        """The optimizer steps of the installed model."""
        assert self._role.optimizer is not None
        return self._role.optimizer.steps

    def create(self, lora: LoraConfig | None, seed: int) -> None:
        """Installs a new model: adapters that change nothing yet, or with None the base model's own weights, to be trained."""
        self._install(lora, seed)

    def take(self) -> TenantState:
        """The installed model, as a copy."""
        state, role = self._role.rank_state(), self._role
        shapes = {name: tensor.shape for name, tensor in role.model.state_dict().items()}
        tensors = {
            f"{kind}/{name}": flat.detach().to("cpu", copy=True).view(shapes[name])
            for kind in _KINDS
            for name, (_, flat) in state.get(kind, {}).items()
        }
        tensors |= {f"{GRADIENT}/{name}": tensor for name, tensor in (role.gradient() or {}).items()}
        return TenantState(self.lora, int(state["steps"]), tensors)

    def put(self, state: TenantState) -> None:
        """Installs a model in place of the one before."""
        self._install(state.lora, 0)
        self._role.restore(state.steps, lambda kind, names: {name: state.of(kind)[name] for name in names})
        self._role.set_gradient(state.of(GRADIENT) or None)

    def _install(self, lora: LoraConfig | None, seed: int) -> None:
        model = self._role.model
        if lora is None or self.lora is None:  # the base model's weights may have been trained
            model.load_hf(self._engine.config.model.path)
        model.make_trainable(lora, seed)
        self.lora = lora
        self._role.make_optimizer(Adam())
        self._role.set_gradient(None)

    def forward(self, batch: Batch, loss: str, options: Mapping[str, float]) -> tuple[list[FloatArray], float]:
        """The log-probability of each target, float32 [n] for each sequence, and the loss. Raises TenantError for impossible sequences."""
        return self._run(batch, loss, options, backward=False)

    def forward_backward(self, batch: Batch, loss: str, options: Mapping[str, float]) -> tuple[list[FloatArray], float]:
        """As `forward`, and adds the loss's gradient to that of the next optimizer step."""
        return self._run(batch, loss, options, backward=True)

    def _run(self, batch: Batch, loss: str, options: Mapping[str, float], backward: bool) -> tuple[list[FloatArray], float]:
        self._check(batch)
        ends = [np.append(ids, 0) for ids in batch.inputs]  # every input predicts a target; what follows the last one is not read
        sequences = Sequences(ends, np.ones(sum(map(len, batch.inputs)), dtype=np.float32), SPECS[loss].together)
        targets, model = np.concatenate(batch.targets), self._role.model

        def logprobs(micro_batch: MicroBatch) -> Tensor:
            wanted = micro_batch.targets.clone()
            wanted[wanted != IGNORE] = micro_batch.take(targets)
            return model.logprobs(micro_batch.ids, wanted)

        term = LossTerm(sequences, every(sequences), _BatchLoss(loss, options, batch.columns), logprobs)
        results = self._role.forward_backward(term) if backward else self._role.measure(term)
        shard = self._engine.shard
        found = torch.zeros(len(targets) + 1, dtype=torch.float64, device=shard.device)  # the last one is the loss
        for tokens, values, total in results:
            found[torch.from_numpy(tokens).to(found.device)] = values.double()
            found[-1] += total.double()
        whole = shard.sum(found).cpu().numpy()
        parts = np.split(whole[:-1].astype(np.float32), np.cumsum([len(ids) for ids in batch.inputs])[:-1])
        return list(parts), float(whole[-1])

    def _check(self, batch: Batch) -> None:
        vocabulary = self._role.model.arch.vocab
        longest = max(map(len, batch.inputs))
        if longest > self.longest:
            raise TenantError(f"expected at most {self.longest} tokens in a sequence; found {longest}")
        for ids in (*batch.inputs, *batch.targets):
            if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
                raise TenantError(f"expected token ids from 0 to {vocabulary - 1}; found {int(ids.min())} to {int(ids.max())}")

    def optim_step(self, given: AdamSettings) -> tuple[float, int]:
        """Takes an optimizer step. Without a gradient it is one with a gradient of zero.

        Returns:
            The gradient's norm before clipping, and the number of steps.

        Raises:
            TenantError: the gradient is not finite, and nothing but it has changed: it is zero now. Or the new weights are not finite.
        """
        role = self._role
        assert role.optimizer is not None
        if not role.has_gradient:
            role.clear_gradient()
        role.optimizer.set_adam(Adam(given.beta1, given.beta2, given.eps, given.weight_decay, given.grad_clip_norm))
        try:
            norm = role.optim_step(given.learning_rate)
        except RunFailedError as error:
            role.set_gradient(None)
            raise TenantError(str(error)) from None
        return norm, role.optimizer.steps

    def write_sampler_weights(self, folder: Path) -> None:
        """Fills an empty directory with the installed model: its adapters in PEFT's format, or all weights."""
        model = self._role.model
        assert isinstance(model, Policy)
        if self.lora is None:
            tensors = model.full_tensors()
            assert tensors is not None
            save_whole(tensors, folder)
        else:
            config = self._engine.config
            adapter = model.adapter(*config.published(config.model.path))
            assert adapter is not None
            adapter.write(folder)


def save_whole(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """All weights of a model as one file."""
    from polyreme_trainer.megatron.huggingface.hf_files import save_tensors

    save_tensors(dict(tensors), folder / "model.safetensors")
