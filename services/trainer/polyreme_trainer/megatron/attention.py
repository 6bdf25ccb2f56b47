"""Causal attention for both model specs, with torch's fused kernels.

Invariant: no real token attends to padding, because sequences are padded on the right and attention is causal. A mask exists only where a
sequence is longer than the layer's window.
"""

import functools

import torch
from torch import Tensor

from polyreme_trainer.megatron.mcore import TransformerConfig, is_layer_window_attention


def window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """The number of tokens to which a query of the layer (numbered from 1) attends, including its own; None without a window."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return int(config.window_size[0]) + 1


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    """query [b, heads, s, dim], key and value [b, groups, s, dim] -> [b, heads, s, dim]; heads of a group are adjacent."""
    width = query.shape[2]
    mask = None if window is None or width <= window else _sliding(width, window, query.device)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


@functools.lru_cache(maxsize=1)  # all layers of a forward pass share it
def _sliding(width: int, window: int, device: torch.device) -> Tensor:
    """bool [width, width]: whether the row's position attends to the column's."""
    return torch.ones(width, width, dtype=torch.bool, device=device).tril_().triu_(1 - window)
