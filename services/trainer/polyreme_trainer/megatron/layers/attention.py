"""The core attention of both model specs: rotary embedding, then causal attention within each of the packed sequences.

Invariant: a token attends only to its own sequence, up to its own position and within the layer's window. A mask exists only where a
sequence is longer than the window.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.batches.packing import Copies, Packing
from polyreme_trainer.megatron.layers.rotary import rotate
from polyreme_trainer.megatron.mcore import MegatronModule, TransformerConfig, is_layer_window_attention
from polyreme_trainer.megatron.parallel.context import gather_tokens

Attend = Callable[[Tensor, Tensor, Tensor, Packing], Tensor]
"""The attention of rotated queries and keys, see `Attention.attend`."""


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """The number of tokens to which a query of the layer (numbered from 1) attends, including its own; None without a window."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return int(config.window_size[0]) + 1


def in_blocks(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """Attention by torch's `scaled_dot_product_attention`, for any device and dtype: sequences of similar length are padded and run together.

    query [t, heads, dim], key and value [keys, groups, dim] -> [t, heads, dim]; heads of a group are adjacent.
    """
    blocks = packing.blocks
    parts: list[tuple[Tensor, ...]] = []
    for each, cut in ((query, blocks), (key, packing.key_blocks), (value, packing.key_blocks)):
        sizes = [rows * width for rows, width in cut.shapes]
        padded = each if cut.gather is None else _Pad.apply(each, cut.gather, cut.scatter)
        split = (padded,) if len(sizes) == 1 else padded.split(sizes)
        parts.append(tuple(part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(split, cut.shapes, strict=True)))
    outputs = []
    for number, (q, k, v) in enumerate(zip(*parts, strict=True)):
        mask = packing.mask(number, window, query.dtype)
        outputs.append(causal_attention(q, k, v, scale, mask).transpose(1, 2).flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if blocks.gather is None else _Unpad.apply(output, blocks.scatter)


def in_halves(attend: Attend, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Attention of one context rank's queries [t, heads, dim] to the gathered keys of all ranks, [all tokens, groups, dim]."""
    outputs = []
    for half, queries in zip(packing.halves, query.split([sum(half.lengths) for half in packing.halves]), strict=True):
        assert half.keys is not None
        outputs.append(attend(queries, key.index_select(0, half.keys), value.index_select(0, half.keys), half))
    return torch.cat(outputs)


def of_copies(attend: Attend, query: Tensor, key: Tensor, value: Tensor, packing: Packing, copies: Copies) -> Tensor:
    """Attention where sequences have tokens in common: [t, heads, dim] of the t different tokens. Each sequence gets a copy of its tokens. The
    outputs of a token's copies are equal, and the first one counts."""
    query, key, value = (_Copy.apply(each, copies) for each in (query, key, value))
    return _Unpad.apply(attend(query, key, value, packing), copies.first)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """query [b, heads, s, dim], key and value [b, groups, k, dim] -> [b, heads, s, dim]; heads of a group are adjacent.

    Args:
        mask: [s, k] or [b, 1, s, k], added to the scores; None: causal. It has the dtype of the query, because torch saves a converted copy
            in every layer.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


class _Pad(Function):
    """[t, ...] -> [p, ...]. Causal attention gives positions of padding no gradient, so the backward pass drops them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return x.index_select(0, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


class _Copy(Function):
    """[t, ...] -> [p, ...], each token at all its places. Its gradient is the sum of theirs, always in the same order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x.index_select(0, copies.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = grads[0].flatten(1)
        summed = torch.nn.functional.embedding_bag(ctx.copies.order, rows, ctx.copies.starts, mode="sum")
        return summed.unflatten(1, grads[0].shape[1:]), None


class _Unpad(Function):
    """[p, ...] -> [t, ...]. Positions of padding, and copies, get the gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.positions = len(x)
        return x.index_select(0, scatter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scatter,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.positions, *grads[0].shape[1:]).index_copy_(0, scatter, grads[0]), None


class Attention(MegatronModule):
    """megatron-core's core attention for packed sequences. It has no parameters."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale, self.window = softmax_scale, window_of(config, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        /,
        *,
        packed_seq_params: Packing,
        **_: object,
    ) -> Tensor:
        """query [t, heads, dim], key and value [t, groups, dim] -> [t, heads * dim]; heads of a group are adjacent."""
        cos, sin = packed_seq_params.full if self.window is None else packed_seq_params.sliding
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if packed_seq_params.copies is not None:
            return of_copies(self.attend, query, key, value, packed_seq_params, packed_seq_params.copies).flatten(1)
        if not packed_seq_params.halves:
            return self.attend(query, key, value, packed_seq_params).flatten(1)
        key, value = gather_tokens(torch.cat([key, value], dim=-1)).chunk(2, dim=-1)
        return in_halves(self.attend, query, key, value, packed_seq_params).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """The attention of rotated queries and keys: [t, heads, dim]."""
        return in_blocks(query, key, value, packing, self.scale, self.window)
