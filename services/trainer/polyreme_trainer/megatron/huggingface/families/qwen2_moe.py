"""Qwen1.5 and Qwen2, mixtures of experts: Qwen2's attention, and in every layer routed experts and a gated shared expert."""

from polyreme_trainer.megatron.huggingface.families.base import QKV_BIAS, MappingRow
from polyreme_trainer.megatron.huggingface.families.moe import (
    ATTENTION_LAYER,
    SHARED_GATE,
    MoeFamily,
    expert,
    router,
    shared_expert,
)

GATE = MappingRow(SHARED_GATE, "all", {"mlp.shared_expert_gate.weight": (1, "hidden")})

FAMILY = MoeFamily(
    name="qwen2_moe",
    layer=(*ATTENTION_LAYER, QKV_BIAS, router("mlp"), *shared_expert("shared_expert"), GATE),
    expert=expert("mlp", "gate_proj", "up_proj", "down_proj"),
    defaults={"num_key_value_heads": 16, "norm_topk_prob": False},
    fixed={"qkv_bias": True},
    shared_ffn="shared_expert_intermediate_size",
)
