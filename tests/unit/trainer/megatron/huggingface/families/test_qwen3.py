"""Qwen3: the published model's number of weights, and transformers' default for the size of a head."""

from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

QWEN3_0_6B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_published_model_has_its_number_of_weights() -> None:
    arch = read_architecture(HfConfig(QWEN3_0_6B))
    assert arch.parameters == 596_049_920
    shapes = hf_mapping.hf_shapes(arch)
    assert shapes["model.layers.27.self_attn.q_norm.weight"] == (128,)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (2048, 1024)
