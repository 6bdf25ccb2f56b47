"""AdamW steps through megatron-core's optimizer, and the learning-rate schedule.

A step's gradient is the sum over data ranks, because losses are already divided by the step's global token count. The norm, also for
clipping, is that of the whole model; parameters that tensor ranks replicate count once.

Invariant: a step whose gradient is not finite changes nothing, and a step that produces weights that are not finite ends the run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyreme.config.trainer import OptimizerConfig
from polyreme.errors import RunFailedError
from polyreme_trainer.megatron import mcore
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.model import ShardedModel


@dataclass(frozen=True)
class Adam:
    """Hyper-parameters that are constant during a stage. clip_grad: the largest global gradient norm; 0 disables clipping."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0


class Optimizer:
    """Owns a trainable model's gradients and AdamW moments. One-dimensional parameters have no weight decay."""

    def __init__(self, model: ShardedModel, adam: Adam) -> None:
        assert model.ddp is not None, "a frozen model has no optimizer"
        self.model, self.adam, self._ddp = model, adam, model.ddp
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
        )
        overrides = mcore.get_standard_config_overrides(config)
        with model.device.megatron():
            chained = mcore.get_megatron_optimizer(config, [self._ddp], overrides, use_gloo_process_groups=False)
        (self._inner,) = chained.chained_optimizers
        self._set_hyper_parameters()
        mine = {piece.param for piece in model.slices if piece.primary}
        self._counted = [param for name, param in model.module.named_parameters() if name in mine]
        self.zero_grad()

    def zero_grad(self) -> None:
        """Starts a step: gradients of the following backward passes accumulate from zero."""
        self._ddp.zero_grad_buffer()
        self._inner.zero_grad()  # after a step, the parameters' grads still point into the buffer

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that follow."""
        for group in self._inner.param_groups:
            group["lr"] = lr

    def step(self) -> float:
        """Sums gradients over data ranks, clips, updates the weights. Collective over all ranks.

        Returns:
            The global gradient norm before clipping.

        Raises:
            RunFailedError: the gradient is not finite; weights and moments are unchanged on every rank. Or the new weights, or their
                norm, are not finite; the model is unusable then.
        """
        mcore.finalize_model_grads([self._ddp])
        norm = self._norm(param.main_grad for param in self._counted)
        if not math.isfinite(norm):
            raise RunFailedError("a finite gradient", f"norm {norm}", "Lower the learning rate, or check the last samples.")
        if 0 < self.adam.clip_grad < norm:
            self._ddp.scale_gradients(self.adam.clip_grad / (norm + 1e-6))
        self._inner.prepare_grads()
        self._inner.step_with_ready_grads()
        if not math.isfinite(weights := self._norm(self._counted)):
            lr = self._inner.param_groups[0]["lr"]
            raise RunFailedError(
                "finite weights after a step",
                f"weights of norm {weights} after one at a learning rate of {lr:g}",
                "Lower the learning rate, then start again or continue from the newest checkpoint.",
            )
        return norm

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments and step counts: plain containers, numbers and tensors (not copies)."""
        return self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict` on a rank of the same layout."""
        self._inner.load_state_dict(state)
        self._set_hyper_parameters()  # a fork may have other hyper-parameters

    def _set_hyper_parameters(self) -> None:
        for group in self._inner.param_groups:
            group["betas"], group["eps"] = (self.adam.beta1, self.adam.beta2), self.adam.eps
            group["weight_decay"] = self.adam.weight_decay * group["wd_mult"]
            group["fused"] = self.model.device.kind != "npu"

    @torch.no_grad()
    def _norm(self, tensors: Iterable[Tensor]) -> float:
        """The norm over the whole model. `tensors` has one tensor for each parameter that this rank counts. Collective."""
        norms: list[Tensor] = list(torch._foreach_norm(list(tensors)))
        squared = torch.stack(norms).square().sum()
        torch.distributed.all_reduce(squared, group=parallel_state.get_model_parallel_group())
        return math.sqrt(squared.item())


def adam_of(config: OptimizerConfig) -> Adam:
    """The hyper-parameters of a configured optimizer."""
    return Adam(config.beta1, config.beta2, config.eps, config.weight_decay, config.clip_grad)


def learning_rate(config: OptimizerConfig, iteration: int, iterations: int) -> float:
    """The learning rate of iteration 1 .. iterations: linear warm-up to `lr`, then constant, or linear or cosine decay.

    A decay reaches `min_lr` one iteration after the last, so every iteration trains with a higher rate.
    """
    if iteration <= config.warmup:
        return config.lr * iteration / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (iteration - config.warmup - 1) / max(iterations - config.warmup, 1)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
