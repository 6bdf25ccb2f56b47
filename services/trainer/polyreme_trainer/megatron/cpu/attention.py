"""The core attention on CPU: rotary embedding, then torch's fused scaled-dot-product attention.

Invariant: a micro-batch passes through the model as packed tokens, one row each, in (sequence, position) order. Results at padded positions
are never used.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyreme_trainer.megatron.attention import causal_attention, window_of
from polyreme_trainer.megatron.cpu.functional import rotary
from polyreme_trainer.megatron.mcore import MegatronModule, PackedSeqParams


@dataclass
class Batch(PackedSeqParams):
    """The shape of the packed rows, and the rotary angles of the positions.

    `size` sequences of `width` positions. `full` and `sliding` are (cos, sin) of the layers with full attention, and of those with a
    window, each [width, 1, head_dim / 2] in the compute dtype.
    """

    qkv_format: str = "thd"
    size: int = 0
    width: int = 0
    full: tuple[Tensor, ...] = ()
    sliding: tuple[Tensor, ...] = ()


class Attention(MegatronModule):
    """Causal attention with grouped key-value heads. It takes megatron-core's arguments of a core attention and has no parameters."""

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
        packed_seq_params: Batch,
        **_: Any,
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim]; heads of a group are adjacent."""
        batch = packed_seq_params
        cos, sin = batch.full if self.window is None else batch.sliding
        shape = (batch.size, batch.width)
        out = causal_attention(
            rotary(query.unflatten(0, shape), cos, sin).transpose(1, 2),
            rotary(key.unflatten(0, shape), cos, sin).transpose(1, 2),
            value.unflatten(0, shape).transpose(1, 2),
            self.scale,
            self.window,
        )
        return out.transpose(1, 2).reshape(len(query), -1)
