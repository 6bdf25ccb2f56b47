"""Mixtures of experts: the published models' numbers of weights, total and per token, and refused models."""

from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

SIZES = {"hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3_30B_A3B = SIZES | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
QWEN15_MOE_A2_7B = SIZES | {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = SIZES | {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "router_jitter_noise": 0.0,
    "sliding_window": None,
    "vocab_size": 32000,
}

OLMOE_1B_7B = SIZES | {
    "model_type": "olmoe",
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "vocab_size": 50304,
}

GLM_45_AIR = SIZES | {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_45 = GLM_45_AIR | {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (QWEN3_30B_A3B, 30_532_122_624, 3.35e9),
        (QWEN3_235B_A22B, 235_093_634_560, 22.2e9),
        (QWEN15_MOE_A2_7B, 14_315_784_192, 2.7e9),
        (MIXTRAL_8X7B, 46_702_792_704, 12.9e9),
        (OLMOE_1B_7B, 6_919_161_856, 1.28e9),
        (GLM_45_AIR, 106_852_251_264, 13.4e9),
        (GLM_45, 352_797_829_024, 33.5e9),
    ],
)
def test_the_published_models_have_their_numbers_of_weights(config: dict[str, Any], parameters: int, active: float) -> None:
    arch = read_architecture(HfConfig(config))
    assert arch.parameters == parameters
    assert arch.active_parameters == pytest.approx(active, rel=0.02)


def test_tensors_have_the_names_of_the_published_files() -> None:
    shapes = hf_mapping.hf_shapes(read_architecture(HfConfig(QWEN15_MOE_A2_7B)))
    assert shapes["model.layers.23.mlp.experts.59.down_proj.weight"] == (2048, 1408)
    assert shapes["model.layers.0.mlp.shared_expert_gate.weight"] == (1, 2048)
    assert shapes["model.layers.0.mlp.shared_expert.up_proj.weight"] == (5632, 2048)
    assert shapes["model.layers.0.mlp.gate.weight"] == (60, 2048)
    shapes = hf_mapping.hf_shapes(read_architecture(HfConfig(MIXTRAL_8X7B)))
    assert shapes["model.layers.31.block_sparse_moe.experts.7.w2.weight"] == (4096, 14336)
    shapes = hf_mapping.hf_shapes(read_architecture(HfConfig(GLM_45)))
    assert shapes["model.layers.2.mlp.gate_proj.weight"] == (12288, 5120)
    assert shapes["model.layers.3.mlp.gate.e_score_correction_bias"] == (160,)
    assert shapes["model.layers.91.mlp.shared_experts.down_proj.weight"] == (5120, 1536)
    assert "model.layers.2.mlp.gate.weight" not in shapes and "model.layers.92.input_layernorm.weight" not in shapes


def test_only_the_first_layers_are_dense_and_only_mtp_layers_are_unread() -> None:
    arch = read_architecture(HfConfig(GLM_45))
    assert [layer for layer in range(92) if not arch.has_experts(layer)] == [0, 1, 2] and arch.expert_layers == 89
    assert arch.unread == ("model.layers.92.",)
    assert read_architecture(HfConfig(GLM_45 | {"num_nextn_predict_layers": 0})).unread == ()
    assert read_architecture(HfConfig(QWEN3_30B_A3B)).expert_layers == 48
    every = read_architecture(HfConfig(GLM_45_AIR | {"first_k_dense_replace": 0}))
    assert every.expert_layers == 46 and "model.layers.0.mlp.gate.weight" in every.hf_shapes()


def test_a_part_of_the_features_of_a_head_is_rotated() -> None:
    arch = read_architecture(HfConfig(GLM_45))
    assert arch.rope.features(arch.head_dim) == 64
    nested = {"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        read_architecture(HfConfig(GLM_45 | nested))  # null: vLLM would take 0.5, and transformers 1
    del nested["partial_rotary_factor"]
    assert read_architecture(HfConfig(GLM_45 | nested)).rope.share == 0.25


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_30B_A3B, {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        (QWEN3_30B_A3B, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN15_MOE_A2_7B, {"qkv_bias": False}, "qkv_bias"),
        (QWEN15_MOE_A2_7B, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window"),
        (OLMOE_1B_7B, {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMOE_1B_7B, {"output_router_logits": True, "router_aux_loss_coef": -0.1}, "router_aux_loss_coef"),
        (GLM_45, {"n_group": 2}, "n_group"),
        (GLM_45, {"topk_group": 2}, "topk_group"),
        (GLM_45, {"norm_topk_prob": False}, "norm_topk_prob"),
        (GLM_45, {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        (GLM_45, {"num_local_experts": 128}, "num_local_experts"),
        (GLM_45, {"n_shared_experts": None}, "n_shared_experts"),
        (GLM_45, {"first_k_dense_replace": 92}, "first_k_dense_replace"),
        (GLM_45, {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        (GLM_45, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM_45, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "partial_rotary_factor"),
        (GLM_45, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        (QWEN3_30B_A3B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_would_run_differently_is_refused(config: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_architecture(HfConfig(config | changes))


@pytest.mark.parametrize("model_type", ["dots1", "ernie4_5_moe", "lfm2_moe", "minimax_m2"])
def test_experts_that_a_bias_balances_are_refused_with_this_reason(model_type: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_architecture(HfConfig(QWEN3_30B_A3B | {"model_type": model_type}))
    assert model_type in caught.value.found and "bias" in caught.value.found


def test_the_models_own_coefficient_applies_where_transformers_would_apply_it() -> None:
    """The default is that of the family."""
    switched_on = {"output_router_logits": True}
    assert read_architecture(HfConfig(MIXTRAL_8X7B | {"router_aux_loss_coef": 0.02})).aux_loss_coef == 0
    assert read_architecture(HfConfig(MIXTRAL_8X7B | switched_on | {"router_aux_loss_coef": 0.02})).aux_loss_coef == 0.02
    assert read_architecture(HfConfig(MIXTRAL_8X7B | switched_on | {"router_aux_loss_coef": 0.0})).aux_loss_coef == 0
    assert read_architecture(HfConfig(QWEN3_30B_A3B | switched_on)).aux_loss_coef == 0.001
    assert read_architecture(HfConfig(OLMOE_1B_7B | switched_on)).aux_loss_coef == 0.01


def test_key_heads_under_one_norm_divide_over_the_tensor_ranks() -> None:
    """Two ranks with the same key head would count it twice."""
    shared = read_architecture(HfConfig(OLMOE_1B_7B | {"num_key_value_heads": 2}))
    hf_mapping.check(shared, 2)
    with pytest.raises(ValueError, match="key-value heads = 2"):
        hf_mapping.check(shared, 4)


def test_a_critic_that_transformers_could_not_read_is_refused() -> None:
    assert read_architecture(HfConfig(MIXTRAL_8X7B)).with_value_head().head == "value"
    for config, named in ((OLMOE_1B_7B, "olmoe"), (GLM_45, "glm4_moe")):
        with pytest.raises(ConfigError, match=named):
            read_architecture(HfConfig(config)).with_value_head()
