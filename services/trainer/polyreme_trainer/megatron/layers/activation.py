"""The gated activations of both model specs, each a single autograd node.

Invariant: values equal those of the textbook formulas up to rounding, in the input's dtype.
"""

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.layers.spec import AutogradContext
from polyreme_trainer.megatron.mcore import TransformerConfig


class _Context(AutogradContext):
    is_silu: bool


class Gated(Function):
    """silu(gate) * up (Shazeer 2020), or with GELU's tanh approximation: [..., 2 * ffn], gate first -> [..., ffn]. `keep`:
    whether the activated gate is kept for the backward pass, which otherwise computes it again."""

    @staticmethod
    def forward(ctx: _Context, gate_up: Tensor, is_silu: bool, keep: bool) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = _activate(gate, is_silu)
        ctx.save_for_backward(gate_up, activated if keep else None)
        ctx.is_silu = is_silu
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(_activate(gate, ctx.is_silu) if activated is None else activated, grad, out=grad_up)
        if ctx.is_silu:
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        else:
            torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=grad_gate)
        return out, None, None


def _activate(gate: Tensor, is_silu: bool) -> Tensor:
    return torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")


class GatedActivation:
    """A gated activation with megatron-core's interface: [..., 2 * ffn] (gate, up) -> [..., ffn]. It is no module, since
    megatron-core would ask one for its part of a checkpoint."""

    def __init__(self, config: TransformerConfig) -> None:
        self._is_silu = config.activation_func is torch.nn.functional.silu

    def __call__(self, gate_up: Tensor) -> Tensor:
        # A processor computes the activation slower than it reads it. An accelerator rather keeps a quarter less.
        return Gated.apply(gate_up, self._is_silu, gate_up.device.type == "cpu")


OPTIONS = {"use_te_activation_func": True}
"""Makes megatron-core take the activation from the spec; Transformer Engine itself is not used."""
