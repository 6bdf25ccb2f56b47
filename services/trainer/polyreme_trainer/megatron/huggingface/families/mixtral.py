"""Mixtral 8x7B and 8x22B: Mistral's attention without a window, and experts in every layer.

Invariant: the weights of a token's experts always sum to 1.
"""

from polyreme_trainer.megatron.huggingface.families.moe import ATTENTION_LAYER, MoeFamily, expert, router

FAMILY = MoeFamily(
    name="mixtral",
    layer=(*ATTENTION_LAYER, router("block_sparse_moe")),
    expert=expert("block_sparse_moe", "w1", "w3", "w2"),
    defaults={"num_key_value_heads": 8, "norm_topk_prob": True, "rope_theta": 1e6},
    fixed={"sliding_window": None, "router_jitter_noise": 0.0, "norm_topk_prob": True},
    expert_ffn="intermediate_size",
)
