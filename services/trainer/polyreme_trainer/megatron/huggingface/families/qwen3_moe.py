"""Qwen3, mixtures of experts (30B-A3B, 235B-A22B): Qwen3's attention, and experts in every layer."""

from polyreme_trainer.megatron.huggingface.families import qwen3
from polyreme_trainer.megatron.huggingface.families.moe import ATTENTION_LAYER, MoeFamily, expert, router

FAMILY = MoeFamily(
    name="qwen3_moe",
    layer=(*ATTENTION_LAYER, *qwen3.HEAD_NORMS, router("mlp")),
    expert=expert("mlp", "gate_proj", "up_proj", "down_proj"),
    options=qwen3.FAMILY.options,
    defaults={"num_key_value_heads": 4, "norm_topk_prob": False},
    fixed={"shared_expert_intermediate_size": 0},  # vLLM's model would have one
)
