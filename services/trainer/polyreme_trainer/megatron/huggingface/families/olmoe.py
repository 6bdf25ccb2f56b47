"""OLMoE 1B-7B: Llama's attention with an RMS norm over all query heads and one over all key heads, and experts in every layer.

Invariant: `projection_norms` and the two norm rows belong together.
"""

from polyreme_trainer.megatron.huggingface.families.base import MappingRow
from polyreme_trainer.megatron.huggingface.families.moe import ATTENTION_LAYER, MoeFamily, expert, router

PROJECTION_NORMS = (
    MappingRow("self_attention.q_layernorm.weight", "rows", {"self_attn.q_norm.weight": ("queries",)}),
    MappingRow("self_attention.k_layernorm.weight", "rows", {"self_attn.k_norm.weight": ("keys",)}),
)

FAMILY = MoeFamily(
    name="olmoe",
    layer=(*ATTENTION_LAYER, *PROJECTION_NORMS, router("mlp")),
    expert=expert("mlp", "gate_proj", "up_proj", "down_proj"),
    defaults={"norm_topk_prob": False, "router_aux_loss_coef": 0.01},
    fixed={"clip_qkv": None, "sliding_window": None},
    expert_ffn="intermediate_size",
    projection_norms=True,
    classifier=False,
    vllm_ties=False,
)
