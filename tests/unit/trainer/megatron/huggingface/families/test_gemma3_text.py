"""Gemma 3: the published models' numbers of weights, both spellings of its layers and rotary embeddings, and what is refused."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.rope import Rope
from polyreme_trainer.megatron.layers.rotary import angles

GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


def read(**changes: Any) -> Architecture:
    return read_architecture(HfConfig(GEMMA3_1B | changes))


def test_the_published_model_has_its_number_of_weights() -> None:
    arch = read()
    assert arch.parameters == 999_885_952
    assert (arch.head, arch.window, arch.query_scale, arch.embedding_scale) == ("tied", 512, 256, 1152**0.5)
    shapes = hf_mapping.hf_shapes(arch)
    assert shapes["model.layers.25.post_feedforward_layernorm.weight"] == (1152,)
    assert "model.layers.0.pre_feedforward_layernorm.weight" in shapes


def test_every_sixth_layer_has_full_attention() -> None:
    arch = read()
    assert [layer for layer, sliding in enumerate(arch.sliding) if not sliding] == [5, 11, 17, 23]
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in arch.sliding]
    assert read(layer_types=kinds).sliding == arch.sliding


@pytest.mark.parametrize(
    ("fields", "full", "sliding"),
    [
        ({}, Rope(1e6), Rope(1e4)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, Rope(1e6, "linear", 8.0), Rope(1e4)),
        (
            {
                "rope_theta": None,
                "rope_local_base_freq": None,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
                },
            },
            Rope(5e5, "linear", 8.0),
            Rope(2e4),
        ),
    ],
)
def test_each_kind_of_layer_has_its_rotary_embedding(fields: dict[str, Any], full: Rope, sliding: Rope) -> None:
    arch = read(**fields)
    assert (arch.rope, arch.sliding_rope) == (full, sliding)


def test_the_angles_are_those_of_transformers() -> None:
    config = Gemma3TextConfig.from_dict(GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    arch = read_architecture(HfConfig(config.to_dict()))
    theirs = Gemma3RotaryEmbedding(config)
    assert arch.sliding_rope is not None
    for kind, rope in (("full_attention", arch.rope), ("sliding_attention", arch.sliding_rope)):
        cos, _ = theirs(torch.empty(1), torch.arange(8192).unsqueeze(0), kind)
        ours = angles(rope, arch.head_dim, 8192, torch.device("cpu"))
        assert torch.equal(torch.cat((ours, ours), dim=-1).cos(), cos[0])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"sliding_window": None}, "sliding_window"),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "attention_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 26}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
    ],
)
def test_what_would_run_differently_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(**changes)
