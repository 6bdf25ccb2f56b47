"""The core attention on CPU: rotary embedding, then torch's fused scaled-dot-product attention.

A micro-batch passes through the model as packed tokens, one row each, in (sequence, position) order.

Invariant: no real token attends to padding, because sequences are padded on the right to one width and attention is causal. No mask is
needed, and results at padded positions are never used.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.cpu.functional import rotary
from polyreme_trainer.megatron.mcore import MegatronModule, PackedSeqParams


@dataclass
class Batch(PackedSeqParams):
    """The shape of the packed rows, and the rotary angles of the positions.

    `size` sequences of `width` positions; `cos` and `sin` are [width, 1, head_dim / 2] in the compute dtype.
    """

    qkv_format: str = "thd"
    size: int = 0
    width: int = 0
    cos: Tensor | None = None
    sin: Tensor | None = None


class Attention(MegatronModule):
    """Causal attention with grouped key-value heads. It takes megatron-core's arguments of a core attention and has no parameters."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        /,
        *,
        packed_seq_params: Batch,
        **_: Any,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]; heads of a group are adjacent."""
        batch = packed_seq_params
        assert batch.cos is not None and batch.sin is not None
        tokens, heads, _dim = query.shape
        shape = (batch.size, batch.width)
        query = rotary(query.unflatten(0, shape), batch.cos, batch.sin)
        key = rotary(key.unflatten(0, shape), batch.cos, batch.sin)
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.unflatten(0, shape).transpose(1, 2),
            is_causal=True,
            scale=self.scale,
            enable_gqa=heads != key.shape[2],
        )
        return out.transpose(1, 2).reshape(tokens, -1)
