"""The core attention of both model specs: rotary embedding, then causal attention within each of the packed sequences.

Invariant: a token attends only to its own sequence, up to its own position and within the layer's window. No mask grows with the
square of a sequence's length on CPU.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from polyreme_trainer.megatron.batches.attention_layout import Layout
from polyreme_trainer.megatron.batches.packing import Copies, Packing
from polyreme_trainer.megatron.layers.rotary import rotate
from polyreme_trainer.megatron.mcore import MegatronModule, TransformerConfig, is_layer_window_attention
from polyreme_trainer.megatron.parallel.context import gather_tokens

Attend = Callable[[Tensor, Tensor, Tensor, Packing], Tensor]
"""The attention of rotated queries and keys, see `Attention.attend`."""
Pair = tuple[Tensor, Tensor]


class Context(Protocol):
    """What autograd hands from a forward pass to its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    copies: Copies
    positions: int
    scale: float | None

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """The number of tokens to which a query of the layer (numbered from 1) attends, including its own; None without a window."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return int(config.window_size[0]) + 1


def in_blocks(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """Attention by `scaled_dot_product_attention`, on any device and dtype: pieces of similar length are padded and run together.

    query [t, heads, dim], key and value [keys, groups, dim] -> [t, heads, dim]; heads of a group are adjacent.
    """
    layout = packing.layout(window)
    blocks = layout.blocks
    sizes = [rows * width for rows, width in blocks.shapes]
    parts: list[list[Tensor]] = []
    for each, index in ((query, None), (key, layout.keys), (value, layout.keys)):
        if index is not None:
            padded = each.index_select(0, index)
        else:
            padded = each if blocks.gather is None else _Pad.apply(each, blocks.gather, blocks.scatter)
        split = (padded,) if len(sizes) == 1 else padded.split(sizes)
        parts.append([part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(split, blocks.shapes, strict=True)])
    before = [_keys_before(each, layout) for each in (key, value)]
    outputs = []
    for number, (q, k, v, earlier_keys, earlier_values) in enumerate(zip(*parts, *before, strict=True)):
        if earlier_keys is None:
            output = causal_attention(q, k, v, scale)
        else:
            keys, values = (earlier_keys, k), (earlier_values, v)
            if q.device.type == "cpu":
                output = merged_attention(q, keys, values, layout.mask(number, q.dtype), scale)
            else:
                output = masked_attention(q, keys, values, layout.whole_mask(number, q.dtype), scale)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if blocks.gather is None else _Unpad.apply(output, blocks.scatter)


def _keys_before(keys: Tensor, layout: Layout) -> list[Tensor | None]:
    """The keys or values before the pieces of each block, [rows, groups, width, dim]; None: there are none."""
    if not any(layout.widths):
        return [None] * len(layout.widths)
    shapes = [(rows, width) for (rows, _), width in zip(layout.blocks.shapes, layout.widths, strict=True)]
    split = keys.index_select(0, layout.before).split([rows * width for rows, width in shapes])
    return [part.unflatten(0, shape).transpose(1, 2) if shape[1] else None for part, shape in zip(split, shapes, strict=True)]


def in_halves(attend: Attend, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Attention of one context rank's queries [t, heads, dim] to the gathered keys of all ranks, [all tokens, groups, dim]."""
    outputs = []
    for half, queries in zip(packing.halves, query.split([sum(half.lengths) for half in packing.halves]), strict=True):
        assert half.keys is not None
        outputs.append(attend(queries, key.index_select(0, half.keys), value.index_select(0, half.keys), half))
    return torch.cat(outputs)


def of_copies(attend: Attend, query: Tensor, key: Tensor, value: Tensor, packing: Packing, copies: Copies) -> Tensor:
    """Attention where sequences have tokens in common: [t, heads, dim] of the t different tokens. Each sequence gets a copy of
    its tokens. The outputs of a token's copies are equal, and the first one counts."""
    query, key, value = (_Copy.apply(each, copies) for each in (query, key, value))
    return _Unpad.apply(attend(query, key, value, packing), copies.first)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """query [b, heads, s, dim], key and value [b, groups, s, dim] -> [b, heads, s, dim]; heads of a group are adjacent."""
    grouped = query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def merged_attention(query: Tensor, keys: Pair, values: Pair, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention to earlier keys, and causally to the queries' own, on CPU: [b, heads, s, dim].

    Args:
        query: [b, heads, s, dim].
        keys, values: the earlier ones, [b, groups, k, dim], and the own ones, [b, groups, s, dim].
        mask: added to the scores of the earlier keys: [s, k] or [b, 1, 1, k]; None: all are seen.
    """
    return _MergedAttention.apply(query, *keys, *values, mask, scale)


def masked_attention(query: Tensor, keys: Pair, values: Pair, mask: Tensor, scale: float | None) -> Tensor:
    """As `merged_attention`, on any device, with a mask for all keys: [s, k + s] or [b, 1, s, k + s]."""
    key, value = torch.cat(keys, dim=2), torch.cat(values, dim=2)
    grouped = query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


class _MergedAttention(Function):
    """torch's flash attention for each set of keys; the outputs are joined by their log-sum-exps. With the joined ones, each
    set's backward kernel gives its part of the gradients (Liu et al. 2023). So no mask is for all queries and keys."""

    @staticmethod
    def forward(
        ctx: Context,
        query: Tensor,
        key1: Tensor,
        key2: Tensor,
        value1: Tensor,
        value2: Tensor,
        mask: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, log_sum = flash(query, key1, value1, attn_mask=mask, scale=scale)
        own, own_log_sum = flash(query, key2, value2, is_causal=True, scale=scale)
        joined = torch.logaddexp(log_sum, own_log_sum)
        share = (own_log_sum - joined).exp_().unsqueeze(-1)
        output = torch.lerp(output, own, share.to(output.dtype))
        ctx.save_for_backward(query, key1, key2, value1, value2, mask, output, joined)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key1, key2, value1, value2, mask, output, joined = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        (grad,), scale = grads, ctx.scale
        for_query, for_key1, for_value1 = backward(
            grad, query, key1, value1, output, joined, 0.0, False, attn_mask=mask, scale=scale
        )
        own, for_key2, for_value2 = backward(grad, query, key2, value2, output, joined, 0.0, True, scale=scale)
        return for_query.add_(own), for_key1, for_key2, for_value1, for_value2, None, None


class _Pad(Function):
    """[t, ...] -> [p, ...]. Causal attention gives positions of padding no gradient, so the backward pass drops them."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return x.index_select(0, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scatter,) = ctx.saved_tensors
        return grads[0].index_select(0, scatter), None, None


class _Copy(Function):
    """[t, ...] -> [p, ...], each token at all its places. Its gradient is the sum of theirs, always in the same order."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x.index_select(0, copies.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = grads[0].flatten(1)
        summed = torch.nn.functional.embedding_bag(ctx.copies.order, rows, ctx.copies.starts, mode="sum")
        return summed.unflatten(1, grads[0].shape[1:]), None


class _Unpad(Function):
    """[p, ...] -> [t, ...]. Positions of padding, and copies, get the gradient 0."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        ctx.positions = len(x)
        return x.index_select(0, scatter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
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
            # A copy, since a view would keep queries and keys from before their rotation until the backward pass.
            return self.attend(query, key, value.contiguous(), packed_seq_params).flatten(1)
        key, value = gather_tokens(torch.cat([key, value], dim=-1)).chunk(2, dim=-1)
        return in_halves(self.attend, query, key, value, packed_seq_params).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        """The attention of rotated queries and keys: [t, heads, dim]."""
        return in_blocks(query, key, value, packing, self.scale, self.window)
