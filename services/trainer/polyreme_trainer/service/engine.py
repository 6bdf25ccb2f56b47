"""The training service's engine: one base model, and the models of tenants on it.

Each tenant's model has its adapters, moments, gradient and count of steps. Those that were used last are on the device; the
others are in the host's memory. Batches of several models share a pass when they fit into one micro-batch.

With several ranks, each has its part of every model, and all of them make the same calls in the same order.

Invariant: what a tenant's model computes depends on its own requests only. A model that was moved out and in again has the same
bits. Between two calls, a model's gradient is summed over the ranks, and each keeps its part of the sum.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.config.trainer import LoraConfig
from polyreme.errors import ConfigError, RunFailedError
from polyreme_trainer.algorithms.service_losses import LOSSES
from polyreme_trainer.local import LocalEngine
from polyreme_trainer.megatron.batches.batch import IGNORE, IntArray, MicroBatch, Sequences
from polyreme_trainer.megatron.checkpoints.role_files import Parts, read_parts, whole, write_parts
from polyreme_trainer.megatron.huggingface.hf_files import save_tensors
from polyreme_trainer.megatron.layers.shared_pass import AdapterRun, SharedPass
from polyreme_trainer.megatron.models.build import mesh
from polyreme_trainer.megatron.models.model import TrainedParameters
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.offload.host_copy import copied_to_host
from polyreme_trainer.megatron.parallel.reshard import WEIGHTS, Read
from polyreme_trainer.megatron.training.optimizer import Adam, WeightsLostError
from polyreme_trainer.megatron.training.roles import LossTerm, Role, every
from polyreme_trainer.service.batch import Batch, BatchResult, LossCall, plan_passes
from polyreme_trainer.service.errors import CHECKPOINT_LOST, ModelLostError, TenantError
from polyreme_trainer.service.losses import SPECS
from polyreme_trainer.service.messages import AdamSettings

GRADIENT = "gradient"
"""Kind of state: the gradient since the last optimizer step."""


@dataclass(frozen=True)
class _Tenant:
    """A model on the device: its role has the optimizer and the gradient."""

    lora: LoraConfig | None
    critic: bool
    role: Role[Policy]
    trained: TrainedParameters


@dataclass(frozen=True)
class _Waiting:
    """This rank's part of a model in the host's memory."""

    lora: LoraConfig | None
    critic: bool
    steps: int
    parts: Parts


@dataclass(frozen=True)
class _PassLoss:
    """The losses of several models' batches in one pass, with the models' outputs as result. `starts`: each one's first token."""

    calls: Sequence[LossCall]
    starts: Sequence[int]

    def __call__(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, tuple[IntArray, Tensor, Tensor]]:
        losses, sizes = [], list(batch.runs)
        tokens = np.split(batch.tokens, np.cumsum(sizes)[:-1])
        parts = zip(self.calls, self.starts, tokens, output.split(sizes), batch.sequence.split(sizes), strict=True)
        for call, start, mine, values, sequence in parts:
            if not len(mine):  # other data ranks have the model's sequences
                losses.append(values.sum())
                continue
            inputs = {
                name: torch.from_numpy(column[mine - start]).to(values.device) for name, column in call.batch.columns.items()
            }
            losses.append(LOSSES[call.loss](values, inputs, call.options, sequence - sequence[:1]).sum())
        every = torch.stack(losses)
        return every.sum(), (batch.tokens, output.detach(), every.detach())


class ServiceEngine:
    """Computes requests for the models of tenants, which it knows by name. `open` creates one.

    Attributes:
        most: `resident`, the largest number of models on the device, and of a pass. Those that were used last stay there.
        same_bits: see `SharedPass`.
        ranks: the processes that have the parts of the models.
    """

    def __init__(self, engine: LocalEngine, resident: int, same_bits: bool) -> None:
        self._engine, self.most = engine, resident
        self._model: Policy = engine.actor.model
        self._model.train(TrainedParameters())
        self._shared = SharedPass(self._model.module, self._model.arch, self._model.rank)
        self.same_bits = same_bits
        self._resident: dict[str, _Tenant] = {}
        """The model that was used last is the last one."""
        self._waiting: dict[str, _Waiting] = {}
        self._base_is_changed = False
        self.ranks = engine.ranks
        self._number, self._layout = self.ranks.rank, mesh()

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, resident: int = 16, same_bits: bool = True) -> Iterator["ServiceEngine"]:
        """Loads the base model `model.path`. Raises as `LocalEngine.open`."""
        with LocalEngine.open(config) as engine:
            yield cls(engine, resident, same_bits)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a sequence."""
        return self._model.arch.max_position

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self._model.arch.vocab

    @property
    def dtype(self) -> str:
        return self._model.dtype

    @property
    def pass_bytes(self) -> int:
        """About the size of the batches that fit into one micro-batch, as they are in the log: a token has about 12 bytes."""
        return 12 * self._engine.shard.micro_batch_tokens

    @property
    def models(self) -> dict[str, LoraConfig | None]:
        waiting = {name: state.lora for name, state in self._waiting.items()}
        return waiting | {name: tenant.lora for name, tenant in self._resident.items()}

    @property
    def critics(self) -> set[str]:
        return {name for name, model in (self._waiting | self._resident).items() if model.critic}

    def steps(self, name: str) -> int:
        if name in self._waiting:
            return self._waiting[name].steps
        optimizer = self._resident[name].role.optimizer
        assert optimizer is not None
        return optimizer.steps

    def create(self, name: str, lora: LoraConfig | None, seed: int, critic: bool = False) -> None:
        """See `TenantEngine`, as of the methods that follow."""
        self._make_room(())
        self._model.train(TrainedParameters())
        if lora is None or self._base_is_changed:
            self._model.load_hf(self._engine.config.model.path)
        self._base_is_changed = lora is None
        try:
            self._model.make_trainable(lora, seed, critic=critic)
        except ConfigError as error:
            raise TenantError(f"not supported: {error}") from None
        role = Role(name, self._model, self._engine.actor.output, self._engine.shard)
        role.make_optimizer(Adam())
        self._resident[name] = _Tenant(lora, critic, role, self._model.trained)

    def save(self, name: str, folder: Path, gradient: bool) -> None:
        """Writes the files of `role_files`. Collective."""
        role = self._use(name)
        write_parts(folder, self._number, _parts(role, role.gradient() if gradient else None), self._layout)
        if self._layout.ranks > 1:
            torch.distributed.barrier()

    def load(self, name: str, folder: Path, lora: LoraConfig | None, steps: int, critic: bool = False) -> None:
        """Raises ModelLostError, on every rank, when one of them finds no file."""
        self.remove(name)
        self.create(name, lora, 0, critic)
        found = None
        with suppress(FileNotFoundError):
            found = read_parts(folder, self._model.trained_arch, self._model.rank)
        missing = torch.tensor(float(found is None), device=self._engine.shard.device)
        if self._layout.ranks > 1:
            torch.distributed.all_reduce(missing)
        if found is None or missing:
            raise ModelLostError(CHECKPOINT_LOST)
        self._restore(self._resident[name], steps, *found)

    def _restore(self, tenant: _Tenant, steps: int, read: Read, kinds: Iterable[str]) -> None:
        """Sets a model to what `read` reads. It is the one that is trained."""
        tenant.role.restore(steps, read)
        trained = [param for param, tensor in self._model.module.named_parameters() if tensor.requires_grad]
        tenant.role.set_gradient(read(GRADIENT, trained) if GRADIENT in kinds else None)

    def remove(self, name: str) -> None:
        self._waiting.pop(name, None)
        self._resident.pop(name, None)

    def forward(self, calls: Mapping[str, LossCall]) -> dict[str, BatchResult | TenantError]:
        return self._run(calls, backward=False)

    def forward_backward(self, calls: Mapping[str, LossCall]) -> dict[str, BatchResult | TenantError]:
        return self._run(calls, backward=True)

    def _run(self, calls: Mapping[str, LossCall], backward: bool) -> dict[str, BatchResult | TenantError]:
        results: dict[str, BatchResult | TenantError] = {}
        for name, call in calls.items():
            if (problem := self._problem(call.batch)) is not None:
                results[name] = TenantError(problem)
        tokens = {name: sum(map(len, call.batch.inputs)) for name, call in calls.items() if name not in results}
        # Experts compute the tokens of all models together, and a context rank's tokens of a model are in several places.
        alone = (bool(self._model.arch.experts) and self.same_bits) or self._model.context.ranks > 1
        alike = {name: (SPECS[calls[name].loss].output, SPECS[calls[name].loss].together) for name in tokens}
        for each in sorted(set(alike.values())):
            mine = {name: count for name, count in tokens.items() if alike[name] == each}
            for names in plan_passes(mine, self._engine.shard.micro_batch_tokens, 1 if alone else self.most):
                results |= zip(names, self._run_pass(names, [calls[name] for name in names], backward), strict=True)
        return results

    def _run_pass(self, names: Sequence[str], calls: Sequence[LossCall], backward: bool) -> list[BatchResult]:
        tenants = [self._on_device(name, names) for name in names]
        for tenant in tenants:
            if backward and not tenant.role.has_gradient:
                tenant.role.clear_gradient()
        self._model.train(TrainedParameters())  # the adapters are those of the pass
        inputs = [ids for call in calls for ids in call.batch.inputs]
        ends = [np.append(ids, 0) for ids in inputs]  # every input predicts a target; what follows the last one is not read
        spec = SPECS[calls[0].loss]
        sequences = Sequences(ends, np.ones(sum(map(len, inputs)), dtype=np.float32), spec.together)
        targets = np.concatenate([ids for call in calls for ids in call.batch.targets])

        def prepare(micro_batch: MicroBatch) -> None:
            self._shared.set(self._adapter_runs(tenants, micro_batch), self.same_bits)

        def logprobs(micro_batch: MicroBatch) -> Tensor:
            wanted = micro_batch.targets.clone()
            wanted[wanted != IGNORE] = micro_batch.take(targets)
            runs = micro_batch.runs if self.same_bits and len(micro_batch.indices) else ()
            return self._model.logprobs(micro_batch.ids, wanted, runs=runs)

        def values(micro_batch: MicroBatch) -> Tensor:
            found = self._shared.values(self._model.hidden(micro_batch.ids))
            return self._model.context.join(micro_batch.ids, found)[micro_batch.targets != IGNORE]

        starts = sequences.offsets[np.cumsum([0, *(len(call.batch.inputs) for call in calls)])]
        term = LossTerm(
            sequences,
            every(sequences),
            _PassLoss(calls, starts[:-1].tolist()),
            logprobs if spec.output == "logprobs" else values,
            [len(call.batch.inputs) for call in calls],
            prepare,
        )
        role = tenants[0].role
        results = role.forward_backward(term) if backward else role.measure(term)
        if backward and self._layout.ranks > 1:
            for tenant in tenants:
                self._model.train(tenant.trained)
                tenant.role.gather_gradient()
        shard = self._engine.shard
        found = torch.zeros(len(targets) + len(calls), dtype=torch.float64, device=shard.device)  # the losses are the last ones
        for tokens, output, losses in results:
            found[torch.from_numpy(tokens).to(found.device)] = output.double()
            found[len(targets) :] += losses.double()
        whole = shard.sum(found).cpu().numpy()
        parts = np.split(whole[: len(targets)].astype(np.float32), sequences.offsets[1:-1])
        firsts = np.cumsum([0, *(len(call.batch.inputs) for call in calls)])
        return [
            BatchResult(parts[first:end], float(loss))
            for (first, end), loss in zip(pairwise(firsts), whole[len(targets) :], strict=True)
        ]

    def _adapter_runs(self, tenants: Sequence[_Tenant], micro_batch: MicroBatch) -> list[AdapterRun]:
        """The adapters of this rank's tokens of a micro-batch."""
        adapters = [tenant.trained.adapters for tenant in tenants]
        # A context rank has one model's tokens. An empty micro-batch is padding, whose gradient is 0.
        if self._model.context.ranks > 1 or not len(micro_batch.indices):
            return [AdapterRun(adapters[0], len(micro_batch.ids.ids) // self._model.context.ranks)]
        return [AdapterRun(*each) for each in zip(adapters, micro_batch.runs, strict=True)]

    def _problem(self, batch: Batch) -> str | None:
        vocabulary = self.vocabulary
        longest = max(map(len, batch.inputs))
        if longest > self.longest:
            return f"expected at most {self.longest} tokens in a sequence; found {longest}"
        for ids in (*batch.inputs, *batch.targets):
            if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
                return f"expected token ids from 0 to {vocabulary - 1}; found {int(ids.min())} to {int(ids.max())}"
        return None

    def optim_step(self, name: str, given: AdamSettings) -> tuple[float, int]:
        role = self._use(name)
        assert role.optimizer is not None
        if not role.has_gradient:
            role.clear_gradient()
        role.optimizer.set_adam(Adam(given.beta1, given.beta2, given.eps, given.weight_decay, given.grad_clip_norm))
        try:
            norm = role.optim_step(given.learning_rate)
        except WeightsLostError as error:
            do = "The model and its gradient are as before the step: lower the learning rate, or raise eps."
            raise ModelLostError(f"expected {error.expected}; found {error.found}. {do}") from None
        except RunFailedError as error:
            role.set_gradient(None)
            raise TenantError(str(error)) from None
        return norm, role.optimizer.steps

    def write_sampler_weights(self, name: str, folder: Path) -> None:
        self._use(name)
        if self.models[name] is None:
            tensors = self._model.full_tensors()
            if tensors is not None and self.ranks.leads:
                save_tensors(tensors, folder / "model.safetensors")
        else:
            config = self._engine.config
            adapter = self._model.adapter(*config.published(config.model.path))
            if adapter is not None and self.ranks.leads:
                adapter.write(folder)

    def _use(self, name: str) -> Role[Policy]:
        """Makes a model the one that is trained."""
        tenant = self._on_device(name, (name,))
        self._model.train(tenant.trained)
        return tenant.role

    def _on_device(self, name: str, keep: Sequence[str]) -> _Tenant:
        """Brings a model to the device. Of the others, those of `keep` stay there."""
        if name in self._resident:
            self._resident[name] = self._resident.pop(name)
            return self._resident[name]
        self._make_room(keep)
        waiting = self._waiting[name]
        self.create(name, waiting.lora, 0, waiting.critic)
        shapes = {param: tensor.shape for param, tensor in self._model.state_dict().items()}
        self._restore(self._resident[name], waiting.steps, partial(_read, waiting.parts, shapes), waiting.parts)
        del self._waiting[name]
        return self._resident[name]

    def _make_room(self, keep: Sequence[str]) -> None:
        """Moves the model that was not used for longest to the host's memory, if the device has no room for another one."""
        while len(self._resident) >= self.most:
            name = next(each for each in self._resident if each not in keep)
            role = self._use(name)
            parts = {
                **_parts(role, role.gradient()),
                WEIGHTS: {n: (0, param.flatten()) for n, param in self._model.state_dict().items()},
            }
            tenant = self._resident[name]
            self._waiting[name] = _Waiting(tenant.lora, tenant.critic, self.steps(name), copied_to_host(parts))
            self._engine.device.synchronize()
            del self._resident[name]


def _parts(role: Role[Policy], gradient: Mapping[str, tuple[int, Tensor]] | None) -> dict[str, Mapping[str, tuple[int, Tensor]]]:
    """What this rank saves of a model (not copies)."""
    state = {kind: each for kind, each in role.rank_state().items() if kind != "steps" and each}
    return state if gradient is None else {**state, GRADIENT: gradient}


def _read(parts: Parts, shapes: Mapping[str, torch.Size], kind: str, names: Iterable[str]) -> dict[str, Tensor]:
    """This rank's parameters from its own parts."""
    return {name: whole(parts[kind].get(name), shapes[name]) for name in names}
