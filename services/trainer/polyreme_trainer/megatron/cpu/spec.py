"""The model on CPU: megatron-core's layers with the norms, activation, matrix products and attention of this package.

Invariant: a micro-batch runs as packed rows, one token each, in (sequence, position) order, for which matrix products are fastest on CPU.
"""

from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.cpu.attention import Attention, Batch
from polyreme_trainer.megatron.cpu.functional import rms_norm, swiglu
from polyreme_trainer.megatron.cpu.linear import ColumnParallel, RowParallel, linear
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
)
from polyreme_trainer.megatron.spec import ModelSpec


class RmsNorm(torch.nn.Module):
    """An RMS norm with megatron-core's interface. The weight, [hidden_size], starts with ones."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Swiglu(torch.nn.Module):
    """SwiGLU with megatron-core's interface of an activation: [..., 2 * ffn] (gate, up) -> [..., ffn]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return swiglu(gate_up)


def _block(config: TransformerConfig, layers: int) -> TransformerBlockSubmodules:
    head_norm = RmsNorm if config.qk_layernorm else IdentityOp
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
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=_residual,
            pre_mlp_layernorm=RmsNorm,
            mlp=ModuleSpec(
                module=MLP,
                params={"ffn_hidden_size": config.ffn_hidden_size},
                submodules=MLPSubmodules(linear_fc1=ColumnParallel, linear_fc2=RowParallel, activation_func=Swiglu),
            ),
            mlp_bda=_residual,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RmsNorm)


def _residual(training: bool, fused: bool) -> Any:
    """The residual addition, in place of megatron-core's bias-dropout-add: there is neither bias nor dropout."""
    return _add_residual


def _add_residual(x_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
    return x_with_bias[0] + residual


def _forward(module: GPTModel, ids: Tensor, angles: Tensor) -> Tensor:
    size, width = ids.shape
    rows = module.embedding(input_ids=ids.reshape(1, -1), position_ids=None)
    cos, sin = (part.to(rows.dtype).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    batch = Batch(size=size, width=width, cos=cos, sin=sin)
    return module.decoder(hidden_states=rows, attention_mask=None, packed_seq_params=batch).squeeze(1)


CPU = ModelSpec(
    block=_block,
    forward=_forward,
    linear=linear,
    options={
        "use_te_activation_func": True,  # makes megatron-core take the activation from the spec; Transformer Engine itself is not used
        "use_cpu_initialization": True,
    },
)
