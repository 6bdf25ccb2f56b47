"""Qwen3, dense: Llama's layer with an RMS norm on each query and key head before the rotary embedding.

Invariant: the head norms are the only difference from the base family; `qk_layernorm` and the two norm rows belong together.
"""

from polyreme_trainer.megatron.huggingface.families.base import DENSE_LAYER, MappingRow
from polyreme_trainer.megatron.huggingface.families.window import QwenFamily

HEAD_NORMS = (
    MappingRow("self_attention.q_layernorm.weight", "all", {"self_attn.q_norm.weight": ("head_dim",)}),
    MappingRow("self_attention.k_layernorm.weight", "all", {"self_attn.k_norm.weight": ("head_dim",)}),
)

FAMILY = QwenFamily(
    name="qwen3",
    layer=(*DENSE_LAYER, *HEAD_NORMS),
    options={"qk_layernorm": True},  # also makes megatron-core sum these norms' gradients over the tensor ranks
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
