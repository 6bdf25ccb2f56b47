"""Mistral: the window bounds the sequences; the published model's number of weights."""

from typing import Any

from polyreme_trainer.megatron.families import read_architecture
from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.families.hf_config import HfConfig

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


def test_the_window_is_the_longest_sequence() -> None:
    assert read().max_position == 4096
    assert read(sliding_window=None).max_position == 32768
    assert read(max_position_embeddings=1024).max_position == 1024
    absent = {name: value for name, value in MISTRAL_7B.items() if name != "sliding_window"}
    assert read_architecture(HfConfig(absent)).max_position == 4096
