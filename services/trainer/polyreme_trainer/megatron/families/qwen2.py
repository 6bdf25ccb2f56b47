"""Qwen1.5, Qwen2 and Qwen2.5 (Base, Instruct, Math, Coder), dense: Llama's layer with a bias on queries, keys and values.

Invariant: the bias is the only difference from the base family; `add_qkv_bias` and the row `QKV_BIAS` belong together.
"""

from polyreme_trainer.megatron.families.base import DENSE_LAYER, MappingRow
from polyreme_trainer.megatron.families.window import QwenFamily

QKV_BIAS = MappingRow(
    "self_attention.linear_qkv.bias",
    "qkv",
    {
        "self_attn.q_proj.bias": ("queries",),
        "self_attn.k_proj.bias": ("keys",),
        "self_attn.v_proj.bias": ("keys",),
    },
)

FAMILY = QwenFamily(
    name="qwen2",
    layer=(*DENSE_LAYER, QKV_BIAS),
    options={"add_qkv_bias": True},
    defaults={"num_key_value_heads": 32},
)
