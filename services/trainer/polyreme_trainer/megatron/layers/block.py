"""The modules of a transformer block, by megatron-core's own layer spec.

Invariant: the specs of devices differ in their `Parts` only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from polyreme_trainer.megatron.experts.moe import layer_specs
from polyreme_trainer.megatron.huggingface.families.base import ModelFamily
from polyreme_trainer.megatron.layers.activation import GatedActivation
from polyreme_trainer.megatron.layers.attention import Attention
from polyreme_trainer.megatron.layers.norm import TorchRmsNorm, ends_in_norm, projection_norms
from polyreme_trainer.megatron.layers.spec import with_bias
from polyreme_trainer.megatron.mcore import (
    ColumnParallelLinear,
    IdentityOp,
    RowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)


@dataclass(frozen=True)
class Parts:
    """What the layers of one spec are made of.

    Attributes:
        column, row: the parallel linear layers.
        others: further modules of a layer, by their names in megatron-core's spec.
    """

    attention: type[Attention] = Attention
    norm: type[TorchRmsNorm] = TorchRmsNorm
    column: type[torch.nn.Module] = ColumnParallelLinear
    row: type[torch.nn.Module] = RowParallelLinear
    others: Mapping[str, object] = field(default_factory=dict)

    def block(self, config: TransformerConfig, family: ModelFamily, has_experts: Sequence[bool]) -> TransformerBlockSubmodules:
        """See `ModelSpec`."""
        layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
        head_norm = self.norm if config.qk_layernorm else IdentityOp
        query_norm, key_norm = projection_norms(config) if family.projection_norms else (head_norm, head_norm)
        rows = [with_bias(self.row, family, name) for name in ("self_attention.linear_proj", "mlp.linear_fc2")]
        linear_proj, linear_fc2 = [ends_in_norm(row, self.norm) for row in rows] if family.post_norms else rows
        attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
        attention.submodules = replace(
            attention.submodules,
            linear_qkv=self.column,
            core_attention=self.attention,
            linear_proj=linear_proj,
            q_layernorm=query_norm,
            k_layernorm=key_norm,
        )
        linear_fc1 = with_bias(self.column, family, "mlp.linear_fc1")
        mlp.submodules = replace(mlp.submodules, linear_fc1=linear_fc1, linear_fc2=linear_fc2, activation_func=GatedActivation)
        mlp.params["ffn_hidden_size"] = config.ffn_hidden_size
        layer.submodules = replace(
            layer.submodules, input_layernorm=self.norm, pre_mlp_layernorm=self.norm, mlp=mlp, **self.others
        )
        return TransformerBlockSubmodules(layer_specs=layer_specs(layer, mlp.submodules, has_experts), layer_norm=self.norm)
