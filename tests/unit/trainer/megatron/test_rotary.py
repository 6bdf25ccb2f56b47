"""Rotary angles have the bits of transformers', at positions where an error in the last bit of a frequency would show."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from polyreme_trainer.megatron.families import read_architecture
from polyreme_trainer.megatron.families.hf_config import HfConfig
from polyreme_trainer.megatron.rotary import angles

LONG = 32768


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.5},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "truncate": False, "beta_fast": 16},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.9},
    ],
)
def test_cos_and_sin_are_those_of_transformers_at_long_positions(theta: float, scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=LONG,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    arch = read_architecture(HfConfig(config.to_dict()))
    positions = torch.cat((torch.arange(64), torch.arange(7000, 8000), torch.arange(LONG - 64, LONG)))
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), positions.unsqueeze(0))
    ours = angles(arch.rope, arch.head_dim, LONG, torch.device("cpu"))[positions]
    factor = arch.rope.attention_factor
    assert torch.equal(torch.cat((ours, ours), dim=-1).cos() * factor, cos[0])
    assert torch.equal(torch.cat((ours, ours), dim=-1).sin() * factor, sin[0])
