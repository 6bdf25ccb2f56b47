"""The megatron-core model of a Hugging Face architecture, and the process groups it is sharded over.

The model is megatron-core's own GPTModel; some of its slots are filled from this package: core attention, norms, the activation,
and parallel linear layers that differ from its own in how the product is computed. Dropout is off everywhere, so a forward pass in training and one in evaluation are the same function.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from polyreme.config.trainer import ParallelConfig
from polyreme.errors import ConfigError
from polyreme_trainer.megatron import hf_mapping
from polyreme_trainer.megatron.cpu.attention import Attention
from polyreme_trainer.megatron.cpu.functional import rms_norm, swiglu
from polyreme_trainer.megatron.cpu.linear import ColumnParallel, RowParallel
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.mcore import (
    MLP,
    AttnMaskType,
    GPTModel,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    parallel_state,
)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def init_parallel(parallel: ParallelConfig, device: Device) -> None:
    """Joins the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, and lays the tensor and data groups over them.

    Tensor ranks are neighbours. Every collective has a deadline. Raises ConfigError when the world is not tensor * data ranks.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != parallel.world_size:
        raise ConfigError(
            f"{parallel.world_size} learner ranks (tensor {parallel.tensor} x data {parallel.data})",
            f"WORLD_SIZE={world}",
            "Start as many ranks as trainer.parallel says.",
        )
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # megatron-core overlaps collectives by kernel order
    torch.distributed.init_process_group(device.backend, timeout=COLLECTIVE_TIMEOUT)
    with device.megatron():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
        )


def close_parallel() -> None:
    """Leaves the groups; the process may join others afterwards."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def rank() -> hf_mapping.Rank:
    """This process's place in the model-parallel grid."""
    return hf_mapping.Rank(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )


class RmsNorm(torch.nn.Module):
    """megatron-core's norm slot. Weight [hidden_size], ones at start."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Swiglu(torch.nn.Module):
    """megatron-core's activation slot: [..., 2 * ffn] (gate, up) -> [..., ffn]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)


def build_module(arch: Architecture, dtype: torch.dtype, device: Device) -> GPTModel:
    """A GPTModel of this rank's shard, weights not initialised. Raises ConfigError when the sizes do not divide over the ranks."""
    here = rank()
    try:
        hf_mapping.check(arch, here.tp)
    except ValueError as error:
        raise ConfigError("sizes that divide over the tensor ranks", str(error), "Change trainer.parallel.tensor.") from None
    with device.megatron():
        module = GPTModel(
            config=transformer_config(arch, dtype, here, device),
            transformer_layer_spec=_block_spec(arch, arch.layers // here.pp),
            vocab_size=hf_mapping.padded_vocab(arch, here.tp),
            max_sequence_length=arch.max_position,
            pre_process=here.pp_rank == 0,
            post_process=here.pp_rank == here.pp - 1,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="none",  # rotary angles are applied in core attention
        )
    return module.to(device.torch)


def transformer_config(arch: Architecture, dtype: torch.dtype, here: hf_mapping.Rank, device: Device) -> TransformerConfig:
    """megatron-core's description of the architecture on this rank."""
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_te_activation_func=True,  # "the activation is a module of the spec"; nothing of Transformer Engine is used
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=here.tp,
        pipeline_model_parallel_size=here.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.kind == "cpu",
        perform_initialization=False,
        calculate_per_token_loss=True,  # losses come divided by the global token count: data ranks sum, never average
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
    )


def _block_spec(arch: Architecture, layers: int) -> TransformerBlockSubmodules:
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallel,
                    core_attention=Attention,
                    linear_proj=RowParallel,
                    q_layernorm=IdentityOp,
                    k_layernorm=IdentityOp,
                ),
            ),
            self_attn_bda=_residual,
            pre_mlp_layernorm=RmsNorm,
            mlp=ModuleSpec(
                module=MLP,
                params={"ffn_hidden_size": arch.ffn},
                submodules=MLPSubmodules(linear_fc1=ColumnParallel, linear_fc2=RowParallel, activation_func=Swiglu),
            ),
            mlp_bda=_residual,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RmsNorm)


def _residual(training: bool, fused: bool) -> Any:
    """megatron-core's bias-dropout-add slot without bias and dropout."""
    return _add_residual


def _add_residual(x_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
    return x_with_bias[0] + residual
