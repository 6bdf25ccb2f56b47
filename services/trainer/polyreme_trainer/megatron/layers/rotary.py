"""Rotary embedding: its angles, computed in fp32 with the same operations as in transformers, and the rotation by them.

Invariant: frequencies and angles equal those of transformers bit for bit. A frequency with a wrong last bit causes an error of
1e-3 in log-probabilities at positions of several thousand.
"""

import functools
import math

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.huggingface.families.rope import Rope
from polyreme_trainer.megatron.layers.spec import AutogradContext


@functools.lru_cache(maxsize=4)
def angles(rope: Rope, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """The angle of every position and pair of rotated features: fp32 [positions, features / 2], in radians. The tensor is cached;
    do not change it."""
    frequencies = inverse_frequencies(rope, rope.features(head_dim))
    return torch.outer(torch.arange(positions, dtype=torch.float32), frequencies).to(device)


def inverse_frequencies(rope: Rope, features: int) -> Tensor:
    """Angular frequencies of the rotated features, in radians per position: fp32 [features / 2], on the CPU."""
    wavelengths = rope.theta ** (torch.arange(0, features, 2, dtype=torch.float32) / features)
    plain = 1.0 / wavelengths
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, features)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Llama 3: long wavelengths are multiplied by the factor, short ones are kept, and those between are interpolated."""
    wavelength = 2 * math.pi / plain
    shortest, longest = rope.original_max_position / rope.high, rope.original_max_position / rope.low
    stretched = torch.where(wavelength > longest, plain / rope.factor, plain)
    smooth = (rope.original_max_position / wavelength - rope.low) / (rope.high - rope.low)
    between = ~(wavelength < shortest) * ~(wavelength > longest)
    return torch.where(between, (1 - smooth) * stretched / rope.factor + smooth * stretched, stretched)


def _yarn(rope: Rope, wavelengths: Tensor, head_dim: int) -> Tensor:
    """YaRN, Peng et al. 2023: a linear ramp over the dimensions, from unchanged frequencies to those divided by the factor."""

    def dimension(turns: float) -> float:
        turn = math.log(rope.original_max_position / (turns * 2 * math.pi))
        return (head_dim * turn) / (2 * math.log(rope.theta))

    low, high = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in transformers, against division by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


class _Rotary(Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = 2 * cos.shape[-1]
    (x1, x2), (out1, out2) = x[..., :turned].chunk(2, dim=-1), out[..., :turned].chunk(2, dim=-1)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=sign)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates feature i with feature i + n / 2 by the position's i-th angle, for the first n features (Su et al. 2021, in Hugging
    Face's feature order). The others do not change.

    Args:
        x: [tokens, heads, dim].
        cos, sin: [tokens, 1, n / 2], of each token's position.
    """
    return _Rotary.apply(x, cos, sin)
