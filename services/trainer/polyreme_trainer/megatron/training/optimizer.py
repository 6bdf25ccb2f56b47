"""AdamW steps through megatron-core's optimizer, and the learning-rate schedule.

A step's gradient is the sum over data ranks, because losses are already divided by the step's global token count. The norm, also
for clipping, is that of the whole model; parameters that tensor ranks replicate count once.

With several data ranks, megatron-core's distributed optimizer gives each an equal part of the moments and full-precision weights
(`state_bytes` = one rank's bytes / data ranks). Each sums only its part's gradients and receives the others' new weights.

Invariant: a step whose gradient is not finite changes nothing, and a step that produces weights that are not finite ends the run.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyreme.config.trainer import OptimizerConfig
from polyreme.errors import RunFailedError
from polyreme_trainer.megatron import mcore
from polyreme_trainer.megatron.huggingface.hf_mapping import is_expert, rank_slices
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.models.model import ShardedModel
from polyreme_trainer.megatron.offload.fragments import MASTER, MOMENTS, Fragment, find_fragments
from polyreme_trainer.megatron.offload.optimizer_parts import OptimizerParts


@dataclass(frozen=True)
class Adam:
    """Hyper-parameters that are constant during a stage. clip_grad: the largest global gradient norm; 0 disables clipping."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0


class WeightsLostError(RunFailedError):
    """The weights after a step, or their norm, are not finite: the model is unusable."""


class Optimizer:
    """Owns a trainable model's gradients and AdamW moments. One-dimensional parameters have no weight decay."""

    def __init__(self, model: ShardedModel, adam: Adam) -> None:
        assert model.ddp, "a frozen model has no optimizer"
        self.model, self.adam, self._ddp = model, adam, model.ddp
        self._distributed = self._ddp[0].ddp_config.use_distributed_optimizer
        host = model.host
        self._frees_gradients = host is not None and host.config.is_set
        if self._frees_gradients:
            self._free_gradients()  # before there are full-precision copies
        config = mcore.OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_eps=adam.eps,
            clip_grad=0.0,
            bf16=model.dtype == "bfloat16",
            params_dtype=torch.bfloat16 if model.dtype == "bfloat16" else torch.float32,
            use_distributed_optimizer=self._distributed,
        )
        overrides = mcore.get_standard_config_overrides(config)
        with model.device.megatron(), torch.no_grad():  # without no_grad, a data rank's part of a parameter would have a graph
            chained = mcore.get_megatron_optimizer(config, self._ddp, overrides, use_gloo_process_groups=False)
        self._inner = chained.chained_optimizers
        """One optimizer for experts that expert ranks share, whose state is divided over other ranks, and one for the rest."""
        self._set_hyper_parameters()
        parameters = list(model.module.named_parameters())
        self.fragments = [fragment for inner in self._inner for fragment in find_fragments(parameters, inner)]
        # When several ranks have a parameter, each counts its own fragments. Tensor ranks have equal fragments of the parameters
        # that they do not cut, so only the first one counts those.
        mine = {piece.param for piece in rank_slices(model.trained_arch, model.rank.at(model.rank.tp_rank)) if piece.primary}
        self._counted = [each for each in self.fragments if each.name in mine or is_expert(each.name)]
        self._parts = OptimizerParts(self.fragments, host) if host is not None and host.config.optimizer else None
        """The optimizer's state in parts that are kept in the host's memory; None: the state stays on the device."""
        if not self._frees_gradients:
            self.zero_grad()

    def zero_grad(self) -> None:
        """Starts a step: gradients of the following backward passes accumulate from zero."""
        for gradients in self.gradients():
            if not gradients.untyped_storage().nbytes():
                gradients.untyped_storage().resize_(gradients.nbytes)
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        for inner in self._inner:
            inner.zero_grad()  # after a step, the parameters' grads still point into the buffer

    def set_adam(self, adam: Adam) -> None:
        """The hyper-parameters of the steps that follow. The moments stay."""
        self.adam = adam
        self._set_hyper_parameters()

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that follow."""
        for group in self._groups:
            group["lr"] = lr

    def step(self) -> float:
        """Sums gradients over data ranks, clips, updates the weights. Collective over all ranks.

        Returns:
            The global gradient norm before clipping.

        Raises:
            RunFailedError: the gradient is not finite; weights and moments are unchanged on every rank.
            WeightsLostError: see there.
        """
        self._sum_gradients()
        norm = self._norm(fragment.gradient for fragment in self._counted)
        if not math.isfinite(norm):
            raise RunFailedError("a finite gradient", f"norm {norm}", "Lower the learning rate, or check the last samples.")
        if 0 < self.adam.clip_grad < norm:
            for chunk in self._ddp:
                chunk.scale_gradients(self.adam.clip_grad / (norm + 1e-6))
        for inner in self._inner:
            inner.prepare_grads()
            if self._parts is None:
                inner.step_with_ready_grads()
        if self._parts is not None:
            self._parts.step(self._inner)
        if self._frees_gradients:
            self._free_gradients()
        if not math.isfinite(weights := self._norm(fragment.cut(fragment.param) for fragment in self._counted)):
            lr = self._groups[0]["lr"]
            raise WeightsLostError(
                "finite weights after a step",
                f"weights of norm {weights} after one at a learning rate of {lr:g}",
                "Lower the learning rate, then start again or continue from the newest checkpoint.",
            )
        return norm

    @torch.no_grad()
    def gather_gradient(self) -> None:
        """Sums the gradients over all ranks before the step, so they are the same when `step` sums them again. Collective."""
        self._sum_gradients()
        self.keep_own()

    @torch.no_grad()
    def keep_own(self) -> None:
        """Of the sum of all ranks' gradients, keeps this rank's part: the rest is 0."""
        counted = {fragment.name for fragment in self._counted}
        own = [each for each in self.fragments if each.name in counted or not self._is_summed(each)]
        kept = [(fragment.gradient, fragment.gradient.clone()) for fragment in own]
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        for gradient, value in kept:
            gradient.copy_(value)

    def _is_summed(self, fragment: Fragment) -> bool:
        """Whether tensor ranks or stages have parts of the gradient of a parameter that they share. Otherwise each has it all."""
        config, param = self.model.chunks[0].config, fragment.param
        if self.model.adapters is not None:
            return self.model.adapters.is_partial(param)
        return (
            (config.sequence_parallel and getattr(param, "sequence_parallel", False))
            or (config.qk_layernorm and ("q_layernorm" in fragment.name or "k_layernorm" in fragment.name))
            or getattr(param, "shared_embedding", False)
        )

    def _sum_gradients(self) -> None:
        mcore.finalize_model_grads(self._ddp)
        if self.model.adapters is not None:
            self.model.adapters.sum_gradients()

    @property
    def state_bytes(self) -> int:
        """Bytes of this rank's moments and full-precision copies of weights, after the first step."""
        return sum(tensor.nbytes for fragment in self.fragments for tensor in fragment.state_tensors().values())

    def tensors(self) -> Iterator[Tensor]:
        """The moments and the fp32 tensors that AdamW steps. Some of these tensors are parts of the model's weights."""
        for fragment in self.fragments:
            yield fragment.main
            yield from fragment.moments.values()

    def gradients(self) -> Iterator[Tensor]:
        """Gradient buffers, which `zero_grad` overwrites at the next step. With offload, they have memory during steps only."""
        for chunk in self._ddp:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    @property
    def steps(self) -> int:
        """The number of steps since the moments were zero."""
        return max((int(each.adam.state[each.main]["step"]) for each in self.fragments if each.moments), default=0)

    def rank_state(self) -> dict[str, dict[str, tuple[int, Tensor]]]:
        """This rank's moments and full-precision copies, as in `RankState` (not copies)."""
        state: dict[str, dict[str, tuple[int, Tensor]]] = {kind: {} for kind in (*MOMENTS, MASTER)}
        for fragment in self.fragments:
            for kind, tensor in fragment.state_tensors().items():
                now = tensor if self._parts is None else self._parts.now(fragment, tensor)
                state[kind][fragment.name] = fragment.start, now.flatten()
        return state

    @torch.no_grad()
    def restore(self, steps: int, read: Callable[[str, Iterable[str]], dict[str, Tensor]]) -> None:
        """Sets moments and full-precision copies to saved ones, after the model's weights. See `Role.restore`."""
        for part in [self.fragments] if self._parts is None else self._parts.visits():
            for fragment in part:
                fragment.adam.state.pop(fragment.main, None)
            self._restore(part, steps, read)
        self._set_hyper_parameters()  # a fork may have other hyper-parameters

    def _restore(self, part: Sequence[Fragment], steps: int, read: Callable[[str, Iterable[str]], dict[str, Tensor]]) -> None:
        names = [fragment.name for fragment in part]
        fused = self.model.device.kind != "npu"
        for kind in MOMENTS if steps else ():
            whole = read(kind, names)
            for fragment in part:
                main, state = fragment.main, fragment.adam.state
                if main not in state:  # each has its own count of steps, because AdamW increments it in place
                    state[main] = {"step": torch.tensor(float(steps), device=main.device if fused else "cpu")}
                state[main][kind] = torch.empty_like(main).copy_(fragment.cut(whole[fragment.name]).view_as(main))
        if any(fragment.copied for fragment in part):
            whole = read(MASTER, names)
            for fragment in part:
                fragment.main.copy_(fragment.cut(whole[fragment.name]).view_as(fragment.main))

    def _free_gradients(self) -> None:
        for gradients in self.gradients():
            gradients.untyped_storage().resize_(0)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for inner in self._inner for group in inner.param_groups]

    def _set_hyper_parameters(self) -> None:
        for group in self._groups:
            group["betas"], group["eps"] = (self.adam.beta1, self.adam.beta2), self.adam.eps
            group["weight_decay"] = self.adam.weight_decay * group["wd_mult"]
            group["fused"] = self.model.device.kind != "npu"

    @torch.no_grad()
    def _norm(self, tensors: Iterable[Tensor]) -> float:
        """The norm over the whole model. `tensors` has one tensor for each fragment that this rank counts. Collective."""
        squared = sum_of_squares(list(tensors), self.model.device.torch)
        # With the distributed optimizer every data rank has a part; otherwise each has everything.
        torch.distributed.all_reduce(squared, group=None if self._distributed else parallel_state.get_model_parallel_group())
        return math.sqrt(squared.item())


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all elements, fp32 [], on `device`; 0 without tensors, since a rank may have none to count."""
    norms = list(torch._foreach_norm(tensors)) if tensors else []
    return torch.stack([*norms, torch.zeros((), device=device)]).square().sum()


def adam_of(config: OptimizerConfig) -> Adam:
    """The hyper-parameters of a configured optimizer."""
    return Adam(config.beta1, config.beta2, config.eps, config.weight_decay, config.clip_grad)
