"""The gated activations of both model specs, each a single autograd node.

Invariant: values equal those of the textbook formulas up to rounding, in the input's dtype.
"""

from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.layers.spec import AutogradContext
from polyreme_trainer.megatron.mcore import TransformerConfig

ROWS = 4096
"""The rows of a backward pass that have temporary numbers at a time."""


class _Context(AutogradContext):
    is_silu: bool


class Gated(Function):
    """silu(gate) * up (Shazeer 2020), or with GELU's tanh approximation: [..., 2 * ffn], gate first -> [..., ffn]. The backward
    pass computes the activated gate again."""

    @staticmethod
    def forward(ctx: _Context, gate_up: Tensor, is_silu: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        ctx.save_for_backward(gate_up)
        ctx.is_silu = is_silu
        return _activate(gate, is_silu).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (gate_up,) = grads, ctx.saved_tensors
        out = gate_up.new_empty(gate_up.shape)
        silu, gelu = torch.ops.aten.silu_backward.grad_input, torch.ops.aten.gelu_backward.grad_input
        backward = silu if ctx.is_silu else partial(gelu, approximate="tanh")
        rows = (each.flatten(0, -2).split(ROWS) for each in (grad, gate_up, out))
        for grad_part, part, out_part in zip(*rows, strict=True):
            (gate, up), (grad_gate, grad_up) = part.chunk(2, dim=-1), out_part.chunk(2, dim=-1)
            torch.mul(_activate(gate, ctx.is_silu), grad_part, out=grad_up)
            backward(grad_part * up, gate, grad_input=grad_gate)
        return out, None


def _activate(gate: Tensor, is_silu: bool) -> Tensor:
    return torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")


class GatedActivation:
    """A gated activation with megatron-core's interface: [..., 2 * ffn] (gate, up) -> [..., ffn]. It is no module, since
    megatron-core would ask one for its part of a checkpoint."""

    def __init__(self, config: TransformerConfig) -> None:
        self._is_silu = config.activation_func is torch.nn.functional.silu

    def __call__(self, gate_up: Tensor) -> Tensor:
        return Gated.apply(gate_up, self._is_silu)


OPTIONS = {"use_te_activation_func": True}
"""Makes megatron-core take the activation from the spec; Transformer Engine itself is not used."""
