"""The tables of the families give parameters the names that Megatron-Bridge gives them.

The names are facts, written down from NVIDIA's Megatron-Bridge: those of Transformer Engine's layers, which fuse a norm into the linear layer
after it. `*` is the number of a layer, `#` that of an expert. Megatron-Bridge has no Qwen1.5-MoE; the names of a shared expert are those of
its Qwen3-Next.
"""

import pytest

from polyreme_trainer.convert.names import engine_name, experts_engine_name, local_name
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import known_families, read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

Names = dict[str, tuple[str, ...]]


def named(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


ENDS: Names = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "output_layer.weight": ("lm_head.weight",),
}
LAYER, HF = "decoder.layers.*", "model.layers.*"
ATTENTION: Names = {
    f"{LAYER}.self_attention.linear_qkv.layer_norm_weight": (f"{HF}.input_layernorm.weight",),
    f"{LAYER}.self_attention.linear_qkv.weight": named(f"{HF}.self_attn", "q_proj.weight", "k_proj.weight", "v_proj.weight"),
    f"{LAYER}.self_attention.linear_proj.weight": (f"{HF}.self_attn.o_proj.weight",),
}
MLP: Names = {
    f"{LAYER}.mlp.linear_fc1.layer_norm_weight": (f"{HF}.post_attention_layernorm.weight",),
    f"{LAYER}.mlp.linear_fc1.weight": named(f"{HF}.mlp", "gate_proj.weight", "up_proj.weight"),
    f"{LAYER}.mlp.linear_fc2.weight": (f"{HF}.mlp.down_proj.weight",),
}
QKV_BIAS: Names = {
    f"{LAYER}.self_attention.linear_qkv.bias": named(f"{HF}.self_attn", "q_proj.bias", "k_proj.bias", "v_proj.bias")
}
QK_NORMS: Names = {
    f"{LAYER}.self_attention.q_layernorm.weight": (f"{HF}.self_attn.q_norm.weight",),
    f"{LAYER}.self_attention.k_layernorm.weight": (f"{HF}.self_attn.k_norm.weight",),
}


def experts(block: str, gate: str, up: str, down: str) -> Names:
    return {
        f"{LAYER}.pre_mlp_layernorm.weight": (f"{HF}.post_attention_layernorm.weight",),
        f"{LAYER}.mlp.router.weight": (f"{HF}.{block}.gate.weight",),
        f"{LAYER}.mlp.experts.linear_fc1.weight#": named(f"{HF}.{block}.experts.#", f"{gate}.weight", f"{up}.weight"),
        f"{LAYER}.mlp.experts.linear_fc2.weight#": (f"{HF}.{block}.experts.#.{down}.weight",),
    }


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
SHARED: Names = {
    f"{LAYER}.mlp.shared_experts.linear_fc1.weight": named(f"{HF}.mlp.shared_expert", "gate_proj.weight", "up_proj.weight"),
    f"{LAYER}.mlp.shared_experts.linear_fc2.weight": (f"{HF}.mlp.shared_expert.down_proj.weight",),
    f"{LAYER}.mlp.shared_experts.gate_weight": (f"{HF}.mlp.shared_expert_gate.weight",),
}
GEMMA3: Names = (
    ENDS
    | ATTENTION
    | QK_NORMS
    | MLP
    | {
        f"{LAYER}.self_attention.linear_proj.post_layernorm.weight": (f"{HF}.post_attention_layernorm.weight",),
        f"{LAYER}.mlp.linear_fc1.layer_norm_weight": (f"{HF}.pre_feedforward_layernorm.weight",),
        f"{LAYER}.mlp.linear_fc2.post_layernorm.weight": (f"{HF}.post_feedforward_layernorm.weight",),
    }
)
GLM4: Names = {
    f"{LAYER}.mlp.router.expert_bias": (f"{HF}.mlp.gate.e_score_correction_bias",),
    f"{LAYER}.mlp.shared_experts.linear_fc1.weight": named(f"{HF}.mlp.shared_experts", "gate_proj.weight", "up_proj.weight"),
    f"{LAYER}.mlp.shared_experts.linear_fc2.weight": (f"{HF}.mlp.shared_experts.down_proj.weight",),
}
BRIDGE: dict[str, Names] = {
    "gemma3_text": GEMMA3,
    "glm4_moe": ENDS | ATTENTION | QKV_BIAS | QK_NORMS | EXPERTS | GLM4,
    "llama": ENDS | ATTENTION | MLP,
    "mistral": ENDS | ATTENTION | MLP,
    "mixtral": ENDS | ATTENTION | experts("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": ENDS | ATTENTION | QK_NORMS | EXPERTS,
    "qwen2": ENDS | ATTENTION | QKV_BIAS | MLP,
    "qwen2_moe": ENDS | ATTENTION | QKV_BIAS | EXPERTS | SHARED,
    "qwen3": ENDS | ATTENTION | QK_NORMS | MLP,
    "qwen3_moe": ENDS | ATTENTION | QK_NORMS | EXPERTS,
}
DENSE: dict[str, Names] = {"glm4_moe": ATTENTION | QKV_BIAS | QK_NORMS | MLP}
"""The first layer, in families where it has no experts."""
COUNT = 3
FIELDS = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 0,
    "num_hidden_layers": COUNT,
    "num_experts": COUNT,
    "num_local_experts": COUNT,
    "n_routed_experts": COUNT,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "sliding_window": None,
}


def numbered(names: Names, layers: range) -> Names:
    """The rows of these layers, each with every expert."""
    rows: Names = {}
    for name, tensors in names.items():
        for layer in layers if "*" in name else range(1):
            for expert in range(COUNT if "#" in name else 1):
                key, *values = (each.replace("*", str(layer)).replace("#", str(expert)) for each in (name, *tensors))
                rows[key] = tuple(values)
    return rows


@pytest.mark.parametrize("family", sorted(BRIDGE))
def test_parameters_have_the_names_of_megatron_bridge(family: str) -> None:
    changes: dict[str, dict[str, object]] = {
        "gemma3_text": {"sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"},
        "glm4_moe": {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5},
        "qwen2_moe": {"shared_expert_intermediate_size": 40},
    }
    fields = FIELDS | {"model_type": family, "hidden_act": "silu"} | changes.get(family, {})
    arch = read_architecture(HfConfig(fields, "config.json"))
    rows = {row.param: tuple(row.tensors) for row, _ in hf_mapping.stage_rows(arch, hf_mapping.Rank())}
    dense = numbered(DENSE.get(family, {}), range(1))
    bridge = numbered(BRIDGE[family], range(bool(dense), COUNT))
    assert rows == {local_name(name): tensors for name, tensors in (dense | bridge).items()}
    written = experts_engine_name if arch.experts else engine_name
    assert all(written(local_name(name)) == name for name in bridge if ".experts." not in name)
    assert all(engine_name(local_name(name)) == name for name in dense)


def test_every_family_is_compared() -> None:
    assert set(known_families()) == set(BRIDGE)
