"""The matrix products of megatron-core's parallel layers on CPU, with the library that is fast on the processor.

On CPU, torch uses MKL for fp32 products, which reaches a third of the speed on processors that are not Intel's. oneDNN generates
code for the processor on which it runs. On Intel's it is as fast as MKL except for the gradients of weights, where both operands
are transposed and it takes 1.2 to 2 times as long.

Invariant: products and gradients are those of torch's linear function, in the same precision. A weight's gradient is added to its
`main_grad` exactly once.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.distributed import ProcessGroup

from polyreme_trainer.megatron.layers.spec import AutogradContext
from polyreme_trainer.megatron.mcore import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region


def _made_by_intel() -> bool:
    """Whether Linux names Intel as the maker of this machine's processor. False on other systems."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return False
    with info.open() as text:
        return "GenuineIntel" in text.read(200)  # of the first processor: a list of hundreds takes long to make


_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_ONEDNN_TYPES = {torch.float32}
"""The types of products that oneDNN computes on this processor: bfloat16 needs AVX-512 or newer."""
if _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported():
    _ONEDNN_TYPES.add(torch.bfloat16)
_MKL = torch.backends.mkl.is_available() and _made_by_intel()
_NARROW = 64
"""Columns of an operand up to which torch's own product is faster for a weight's gradient: 2 to 8 times for ranks of 8 to 64."""
TOKENS = 4096
"""Tokens of a weight's gradient whose transposed rows oneDNN copies at a time."""


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, k] @ weight [m, k].T + bias [m]."""
    by_onednn = _ONEDNN and x.dtype in _ONEDNN_TYPES and not (_MKL and x.dtype == torch.float32)
    if not by_onednn or not x.numel():  # an expert without tokens
        return torch.nn.functional.linear(x, weight, bias)
    if bias is None and x.stride(0) == 1 and x.shape[1] > TOKENS and x.dtype == torch.float32:  # a weight's gradient
        parts = zip(x.split(TOKENS, 1), weight.split(TOKENS, 1), strict=True)
        return functools.reduce(Tensor.add_, (_product(*part) for part in parts))
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _weight_grad(grad: Tensor, rows: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """grad [n, m].T @ rows [n, k]. MKL adds it to `main_grad` in the same pass; then there is nothing to return."""
    if _MKL and main_grad is not None and main_grad.dtype == grad.dtype == torch.float32:
        main_grad.addmm_(grad.t(), rows)
        return None
    if min(grad.shape[1], rows.shape[1]) > _NARROW:
        return _product(grad.t(), rows.t())
    # An adapter's. oneDNN would copy the transposed wide operand, which takes longer than the product.
    return torch.mm(grad.t(), rows) if grad.shape[1] <= rows.shape[1] else torch.mm(rows.t(), grad).t().contiguous()


class _LinearContext(AutogradContext):
    group: ProcessGroup | None
    shape: torch.Size
    with_bias: bool
    main_grad: Tensor | None


class _Linear(Function):
    @staticmethod
    def forward(ctx: _LinearContext, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        rows = x.flatten(0, -2)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)  # a frozen weight's gradient needs no input
        ctx.group, ctx.shape, ctx.with_bias = group, x.shape, bias is not None
        ctx.main_grad = getattr(weight, "main_grad", None)  # megatron-core's gradient buffer
        return _product(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: _LinearContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_x = _product(grad, weight.t()) if ctx.needs_input_grad[0] else None
        reduced = None
        if ctx.group is not None and grad_x is not None:
            reduced = torch.distributed.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = _weight_grad(grad, rows, ctx.main_grad) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(0) if ctx.with_bias and ctx.needs_input_grad[2] else None
        if reduced is not None:
            reduced.wait()
        return None if grad_x is None else grad_x.view(ctx.shape), grad_weight, grad_bias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, sum_input_grads: bool) -> Tensor:
    """x @ weight.T + bias; see `spec.Linear`."""
    return _Linear.apply(x, weight, bias, group if sum_input_grads else None)


class ColumnParallel(ColumnParallelLinear):
    """megatron-core's layer with `linear` as its matrix product. The tensor ranks split the output features."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, allreduce_dgrad: bool, sequence_parallel: bool, **_: object
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=self.tp_group)
        return linear(input, weight, bias, self.tp_group, allreduce_dgrad)


class RowParallel(RowParallelLinear):
    """megatron-core's layer with `linear` as its matrix product. The tensor ranks split the input features and sum the output."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **_: object) -> Tensor:
        return linear(input, weight, bias, self.tp_group, False)
