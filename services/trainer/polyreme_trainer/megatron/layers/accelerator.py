"""The models on cuda and npu: megatron-core's own layer spec with torch's norms and a fused kernel for attention over packed sequences.

Invariant: the two specs differ only in the attention kernel; torch and torch_npu dispatch all other calls to their own kernels.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from polyreme_trainer.megatron.batches.packing import Packing
from polyreme_trainer.megatron.experts.moe import layer_specs
from polyreme_trainer.megatron.huggingface.families.base import ModelFamily
from polyreme_trainer.megatron.layers.attention import Attention, in_blocks
from polyreme_trainer.megatron.layers.norm import TorchRmsNorm, ends_in_norm, projection_norms
from polyreme_trainer.megatron.layers.spec import ModelSpec, with_bias
from polyreme_trainer.megatron.mcore import (
    ColumnParallelLinear,
    IdentityOp,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    linear_with_grad_accumulation_and_async_allreduce,
)

FLASH_WIDTH = 256
"""The largest head that torch's kernel takes; its width must be a multiple of 8."""
NPU_SEQUENCES = 1024
"""The largest number of packed sequences that torch_npu's kernel takes."""


def flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """As `in_blocks`, with torch's flash attention over packed sequences where torch has a kernel."""
    if query.dtype == torch.float32 or query.shape[2] % 8 or query.shape[2] > FLASH_WIDTH:
        return in_blocks(query, key, value, packing, scale, window)
    from torch.nn.attention.varlen import varlen_attn  # torch_npu's torch has it with other parameters

    earlier = -1 if window is None else window - 1  # tokens before its own to which a query attends; -1: all
    grouped = query.shape[1] != key.shape[1]
    # The mask aligns the last query with the last key, also where there are fewer queries than keys.
    output = varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens_q,
        packing.cu_seqlens_kv,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        scale=scale,
        window_size=(earlier, 0),
        enable_gqa=grouped,
    )
    assert isinstance(output, Tensor)  # the log-sum-exp was not requested
    return output


def npu_fused(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """As `in_blocks`, with torch_npu's fused attention in its packed layout TND."""
    if len(packing.lengths) > NPU_SEQUENCES:
        return in_blocks(query, key, value, packing, scale, window)
    return torch.ops.npu.npu_fusion_attention(  # `Device` has imported torch_npu
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_later(query.device),
        scale=query.shape[2] ** -0.5 if scale is None else scale,
        pre_tockens=2**31 - 1 if window is None else window - 1,
        next_tockens=0,
        sparse_mode=3
        if window is None
        else 4,  # causal, or a band below the diagonal, which ends at the last query and the last key
        actual_seq_qlen=packing.ends,
        actual_seq_kvlen=packing.key_ends,
    )[0]


@functools.lru_cache(maxsize=1)
def _later(device: torch.device) -> Tensor:
    """The mask from which the kernel makes that of each sequence: bool [2048, 2048], True for later positions."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


class FlashAttention(Attention):
    """The core attention on cuda."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        return flash(query, key, value, packing, self.scale, self.window)


class NpuAttention(Attention):
    """The core attention on npu."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        return npu_fused(query, key, value, packing, self.scale, self.window)


def _block(
    core: type[Attention], config: TransformerConfig, family: ModelFamily, has_experts: Sequence[bool]
) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    head_norm = TorchRmsNorm if config.qk_layernorm else IdentityOp
    query_norm, key_norm = projection_norms(config) if family.projection_norms else (head_norm, head_norm)
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    rows = [with_bias(RowParallelLinear, family, name) for name in ("self_attention.linear_proj", "mlp.linear_fc2")]
    linear_proj, linear_fc2 = [ends_in_norm(row, TorchRmsNorm) for row in rows] if family.post_norms else rows
    attention.submodules = replace(
        attention.submodules, core_attention=core, linear_proj=linear_proj, q_layernorm=query_norm, k_layernorm=key_norm
    )
    linear_fc1 = with_bias(ColumnParallelLinear, family, "mlp.linear_fc1")
    mlp.submodules = replace(mlp.submodules, linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    mlp.params["ffn_hidden_size"] = config.ffn_hidden_size
    layer.submodules = replace(
        layer.submodules,
        input_layernorm=TorchRmsNorm,
        pre_mlp_layernorm=TorchRmsNorm,
        mlp=mlp,
    )
    return TransformerBlockSubmodules(layer_specs=layer_specs(layer, mlp.submodules, has_experts), layer_norm=TorchRmsNorm)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: object, sum_input_grads: bool) -> Tensor:
    return linear_with_grad_accumulation_and_async_allreduce(
        x,
        weight,
        bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=sum_input_grads,
        sequence_parallel=False,
        tp_group=group,
    )


CUDA = ModelSpec(block=functools.partial(_block, FlashAttention), linear=_linear)
NPU = ModelSpec(block=functools.partial(_block, NpuAttention), linear=_linear)
