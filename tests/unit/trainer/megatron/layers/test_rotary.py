"""Rotary angles have the bits of transformers', at positions where an error in the last bit of a frequency would show."""

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.layers.rotary import angles, rotate

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
        hidden_size=256, num_attention_heads=2, max_position_embeddings=LONG, rope_parameters={"rope_theta": theta, **scaling}
    )
    arch = read_architecture(HfConfig(config.to_dict()))
    positions = torch.cat((torch.arange(64), torch.arange(7000, 8000), torch.arange(LONG - 64, LONG)))
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1), positions.unsqueeze(0))
    ours = angles(arch.rope, arch.head_dim, LONG, torch.device("cpu"))[positions]
    factor = arch.rope.attention_factor
    assert torch.equal(torch.cat((ours, ours), dim=-1).cos() * factor, cos[0])
    assert torch.equal(torch.cat((ours, ours), dim=-1).sin() * factor, sin[0])


def test_each_pair_turns_by_its_tokens_angle() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 8, generator=generator, dtype=torch.float64).requires_grad_()
    turns = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64)
    turned = torch.view_as_complex(torch.stack(x.detach().chunk(2, dim=-1), dim=-1).contiguous()) * torch.exp(1j * turns)
    torch.testing.assert_close(rotate(x, turns.cos(), turns.sin()), torch.cat((turned.real, turned.imag), dim=-1))
    assert gradcheck(lambda x: rotate(x, turns.cos(), turns.sin()), (x,))


def test_features_after_the_rotated_ones_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 8, generator=generator, dtype=torch.float64).requires_grad_()
    turns = torch.randn(6, 1, 2, generator=generator, dtype=torch.float64)
    turned = rotate(x, turns.cos(), turns.sin())
    torch.testing.assert_close(turned[..., :4], rotate(x[..., :4], turns.cos(), turns.sin()))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert gradcheck(lambda x: rotate(x, turns.cos(), turns.sin()), (x,))
