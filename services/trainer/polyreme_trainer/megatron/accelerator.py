"""The model on cuda and npu: megatron-core's own layer spec with torch's fused attention and norms.

Invariant: the code is the same for both devices; torch and torch_npu dispatch the same calls to their own kernels.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.attention import causal_attention, window_of
from polyreme_trainer.megatron.families.base import ModelFamily
from polyreme_trainer.megatron.mcore import (
    GPTModel,
    IdentityOp,
    MegatronModule,
    RowParallelLinear,
    SelfAttention,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    linear_with_grad_accumulation_and_async_allreduce,
)
from polyreme_trainer.megatron.moe import experts
from polyreme_trainer.megatron.norm import TorchRmsNorm, ends_in_norm, projection_norms
from polyreme_trainer.megatron.spec import Angles, ModelSpec, whole_sequence


class FusedAttention(MegatronModule):
    """Causal attention with torch's fused kernels. Megatron-core's DotProductAttention would store a [b, heads, s, s] matrix."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale, self.window = softmax_scale, window_of(config, layer_number)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """query [s, b, heads, dim], key and value [s, b, groups, dim] -> [s, b, heads * dim]; heads of a group are adjacent."""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        out = causal_attention(query, key, value, self.scale, self.window)
        return out.permute(2, 0, 1, 3).flatten(2)


class RotatedAttention(SelfAttention):
    """megatron-core's attention, which takes the rotary embedding of its layer's kind out of both."""

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        """`rotary_pos_emb`: the angles of full and of sliding attention in one tensor, as a recomputed layer requires: [2, s, 1, 1, head_dim]."""
        kind = rotary_pos_emb[0 if self.core_attention.window is None else 1]
        return super().forward(*arguments, rotary_pos_emb=kind, **options)


def _block(config: TransformerConfig, family: ModelFamily, layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    head_norm = TorchRmsNorm if config.qk_layernorm else IdentityOp
    query_norm, key_norm = projection_norms(config) if family.projection_norms else (head_norm, head_norm)
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    attention.module = RotatedAttention
    attention.submodules = replace(
        attention.submodules, core_attention=FusedAttention, q_layernorm=query_norm, k_layernorm=key_norm
    )
    if family.post_norms:
        normed = ends_in_norm(RowParallelLinear, TorchRmsNorm)
        attention.submodules = replace(attention.submodules, linear_proj=normed)
        mlp.submodules = replace(mlp.submodules, linear_fc2=normed)
    mlp.params["ffn_hidden_size"] = config.ffn_hidden_size
    layer.submodules = replace(
        layer.submodules,
        input_layernorm=TorchRmsNorm,
        pre_mlp_layernorm=TorchRmsNorm,
        mlp=experts(mlp.submodules) if config.num_moe_experts else mlp,
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=TorchRmsNorm)


def _forward(module: GPTModel, ids: Tensor, angles: Angles) -> Tensor:
    embedded = module.embedding(input_ids=ids, position_ids=None) if module.pre_process else None
    both_halves = torch.stack([torch.cat((part, part), dim=-1)[:, None, None, :] for part in (angles.full, angles.sliding)])
    hidden = module.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=both_halves)
    return whole_sequence(module, hidden).transpose(0, 1).flatten(0, 1) if module.post_process else hidden


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


def _rows(positions: Tensor) -> Tensor:
    return positions.transpose(0, 1).flatten(0, 1)


ACCELERATOR = ModelSpec(block=_block, forward=_forward, rows=_rows, linear=_linear)
