"""Mistral: the window of its layers; the published model's number of weights."""

from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def read(**changes: Any) -> Architecture:
    return read_architecture(HfConfig(MISTRAL_7B | changes))


def test_the_published_model_has_its_number_of_weights() -> None:
    assert read().parameters == 7_241_732_096


def test_every_layer_has_the_window() -> None:
    assert (read().window, read().sliding, read().max_position) == (4096, (True,) * 32, 32768)
    assert (read(sliding_window=None).window, read(sliding_window=None).sliding) == (None, ())
    absent = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}
    assert read_architecture(HfConfig(absent)).window == 4096


def test_a_list_of_layers_with_windows_is_refused() -> None:
    """transformers ignores it for this family, and vLLM does not."""
    with pytest.raises(ConfigError, match="layer_types"):
        read(layer_types=["full_attention"] * 32)
