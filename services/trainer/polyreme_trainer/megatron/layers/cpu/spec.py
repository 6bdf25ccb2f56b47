"""The model on CPU: megatron-core's layers with the norms, activations and matrix products of this package.

Invariant: parameters and results are those of megatron-core's own layers; only the time differs. Point-wise
functions are single autograd nodes, whose statistics are at least fp32.
"""

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.layers.activation import OPTIONS
from polyreme_trainer.megatron.layers.attention import Attention
from polyreme_trainer.megatron.layers.block import Parts
from polyreme_trainer.megatron.layers.cpu.linear import ColumnParallel, RowParallel, linear
from polyreme_trainer.megatron.layers.norm import TorchRmsNorm
from polyreme_trainer.megatron.layers.spec import AutogradContext, ModelSpec


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        if weight.dtype != x.dtype:
            return (x * rstd * weight).to(x.dtype)
        return (x * rstd).to(x.dtype).mul_(weight)  # rounds where the reference implementations round

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, rstd = ctx.saved_tensors
        wide, factor = x.to(rstd.dtype), weight.to(rstd.dtype)
        product = (grad * wide).mul_(rstd)  # the terms of the weight's gradient
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        # Not by a matrix product, whose order of additions depends on the number of rows, see `shared_pass`.
        mean = product.mul_(factor).sum(-1, keepdim=True).div_(x.shape[-1])
        grad_x = torch.mul(grad, factor, out=product).mul_(rstd)  # the terms have already been summed
        return grad_x.addcmul_(wide, mean.mul_(rstd).mul_(rstd), value=-1).to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps) over the last dimension (Zhang and Sennrich 2019). A wider `weight` multiplies before
    rounding."""
    return _RmsNorm.apply(x, weight, eps)


class RmsNorm(TorchRmsNorm):
    """The norm with `rms_norm` as its kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1 + self.weight.float() if self.zero_centered else self.weight, self.eps)


def _residual(training: bool, fused: bool) -> object:
    """The residual addition, in place of megatron-core's bias-dropout-add: there is no dropout, and each layer added its bias."""
    return lambda x_with_bias, residual, dropout: x_with_bias[0] + residual


CPU = ModelSpec(
    block=Parts(Attention, RmsNorm, ColumnParallel, RowParallel, {"self_attn_bda": _residual, "mlp_bda": _residual}).block,
    linear=linear,
    options={**OPTIONS, "use_cpu_initialization": True},
)
