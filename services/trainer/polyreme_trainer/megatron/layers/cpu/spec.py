"""The model on CPU: megatron-core's layers with the norms, activation and matrix products of this package.

Invariant: parameters and results are those of megatron-core's own layers; only the time differs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme_trainer.megatron.experts.moe import layer_specs
from polyreme_trainer.megatron.huggingface.families.base import ModelFamily
from polyreme_trainer.megatron.layers.attention import Attention
from polyreme_trainer.megatron.layers.cpu.functional import geglu, rms_norm, swiglu
from polyreme_trainer.megatron.layers.cpu.linear import ColumnParallel, RowParallel, linear
from polyreme_trainer.megatron.layers.norm import ends_in_norm, projection_norms
from polyreme_trainer.megatron.layers.spec import ModelSpec, with_bias
from polyreme_trainer.megatron.mcore import (
    MLP,
    AttnMaskType,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
)


class RmsNorm(torch.nn.Module):
    """An RMS norm with megatron-core's interface. Weight [hidden_size]. With `layernorm_zero_centered_gamma` the factor is 1 + weight, in
    fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - ranks then sum its gradient
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1 + self.weight.float() if self.zero_centered else self.weight, self.eps)


class GatedActivation(torch.nn.Module):
    """A gated activation with megatron-core's interface: [..., 2 * ffn] (gate, up) -> [..., ffn]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.function = swiglu if config.activation_func is torch.nn.functional.silu else geglu

    def forward(self, gate_up: Tensor) -> Tensor:
        return self.function(gate_up)


def _block(config: TransformerConfig, family: ModelFamily, has_experts: Sequence[bool]) -> TransformerBlockSubmodules:
    head_norm = RmsNorm if config.qk_layernorm else IdentityOp
    query_norm, key_norm = projection_norms(config) if family.projection_norms else (head_norm, head_norm)
    rows = [with_bias(RowParallel, family, name) for name in ("self_attention.linear_proj", "mlp.linear_fc2")]
    linear_proj, linear_fc2 = [ends_in_norm(row, RmsNorm) for row in rows] if family.post_norms else rows
    linear_fc1 = with_bias(ColumnParallel, family, "mlp.linear_fc1")
    mlp = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2, activation_func=GatedActivation)
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
                    linear_proj=linear_proj,
                    q_layernorm=query_norm,
                    k_layernorm=key_norm,
                ),
            ),
            self_attn_bda=_residual,
            pre_mlp_layernorm=RmsNorm,
            mlp=ModuleSpec(module=MLP, params={"ffn_hidden_size": config.ffn_hidden_size}, submodules=mlp),
            mlp_bda=_residual,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=layer_specs(layer, mlp, has_experts), layer_norm=RmsNorm)


def _residual(training: bool, fused: bool) -> object:
    """The residual addition, in place of megatron-core's bias-dropout-add: there is no dropout, and each layer has added its own
    bias."""
    return _add_residual


def _add_residual(x_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
    return x_with_bias[0] + residual


CPU = ModelSpec(
    block=_block,
    linear=linear,
    options={
        "use_te_activation_func": True,  # makes megatron-core take the activation from the spec; Transformer Engine itself is not used
        "use_cpu_initialization": True,
    },
)
