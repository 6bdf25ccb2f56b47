"""The model on cuda and npu: megatron-core's own layer spec, with torch's fused attention as the core attention.

Invariant: the code is the same for both devices; torch and torch_npu dispatch the same calls to their own kernels. Sequences are padded on
the right and attention is causal, so no real token attends to padding and no mask is needed.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.mcore import (
    GPTModel,
    MegatronModule,
    TransformerBlockSubmodules,
    TransformerConfig,
    WrappedTorchNorm,
    get_gpt_layer_local_spec,
    linear_with_grad_accumulation_and_async_allreduce,
)
from polyreme_trainer.megatron.spec import ModelSpec


class FusedAttention(MegatronModule):
    """Causal attention with torch's fused kernels. Megatron-core's DotProductAttention would store a [b, heads, s, s] matrix."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """query [s, b, heads, dim], key and value [s, b, groups, dim] -> [s, b, heads * dim]; heads of a group are adjacent."""
        out = torch.nn.functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _block(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    attention = layer.submodules.self_attention
    attention.submodules = replace(attention.submodules, core_attention=FusedAttention)
    layer.submodules.mlp.params["ffn_hidden_size"] = config.ffn_hidden_size
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=WrappedTorchNorm)


def _forward(module: GPTModel, ids: Tensor, angles: Tensor) -> Tensor:
    embedded = module.embedding(input_ids=ids, position_ids=None)
    both_halves = torch.cat((angles, angles), dim=-1)[:, None, None, :]  # [s, 1, 1, head_dim]
    hidden = module.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=both_halves)
    return hidden.transpose(0, 1).flatten(0, 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Any, sum_input_grads: bool) -> Tensor:
    return linear_with_grad_accumulation_and_async_allreduce(
        x,
        weight,
        bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=sum_input_grads,
        sequence_parallel=False,
        tp_group=group,
    )


ACCELERATOR = ModelSpec(block=_block, forward=_forward, linear=_linear)
