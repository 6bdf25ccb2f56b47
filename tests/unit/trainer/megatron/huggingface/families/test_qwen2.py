"""Qwen2: either every layer has a window, or none."""

from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(**changes: Any) -> Architecture:
    return read_architecture(HfConfig(QWEN2 | changes))


def test_the_published_model_has_its_number_of_weights_and_no_window() -> None:
    assert read().parameters == 494_032_768
    assert (read().window, read().sliding) == (None, ())


def test_a_window_in_every_layer_is_read() -> None:
    by_number = read(use_sliding_window=True, max_window_layers=0, sliding_window=512)
    by_list = read(use_sliding_window=True, layer_types=["sliding_attention"] * 24, sliding_window=512)
    assert (by_number.window, by_number.sliding) == (by_list.window, by_list.sliding) == (512, (True,) * 24)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_window_layers": 24}, "max_window_layers"),
        ({"max_window_layers": 12}, "max_window_layers"),
        ({"layer_types": ["full_attention"] * 24}, "layer_types"),
        ({"layer_types": ["sliding_attention", "full_attention"] * 12}, "layer_types"),
        ({"max_window_layers": 0, "sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_window_in_some_layers_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(use_sliding_window=True, **changes)
