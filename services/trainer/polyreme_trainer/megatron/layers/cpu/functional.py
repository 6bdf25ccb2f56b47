"""The point-wise functions of a transformer layer as single autograd nodes, with fewer passes over memory.

Each node keeps for the backward pass its inputs and whatever is expensive to recompute, and writes gradients without temporaries where
possible. Inputs are [..., features].

Invariant: values equal those of the textbook formulas up to rounding. Results have the input's dtype; statistics are at least fp32.
"""

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.layers.spec import AutogradContext


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        rstd = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_statistic(x))
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
    """weight * x / sqrt(mean(x ** 2) + eps) over the last dimension (Zhang and Sennrich 2019). A wider `weight` multiplies before rounding."""
    return _RmsNorm.apply(x, weight, eps)


def _statistic(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: AutogradContext, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor) -> Tensor:
        (grad,) = grads
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(activated, grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020). `gate_up` is [..., 2 * ffn], gate first; the result is [..., ffn]."""
    return _Swiglu.apply(gate_up)


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by GELU's tanh approximation. `gate_up` is [..., 2 * ffn], gate first; the result is [..., ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
