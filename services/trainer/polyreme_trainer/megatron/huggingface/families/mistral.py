"""Mistral 7B and models of its shape, dense: Llama's layer, in some models with sliding-window attention.

Invariant: a model has the window in all of its layers or in none.
"""

from polyreme_trainer.megatron.huggingface.families.base import ModelFamily
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.llama import ONLY_VLLM


class _Mistral(ModelFamily):
    def sliding_layers(self, config: HfConfig, layers: int) -> tuple[bool, ...]:
        config.absent("layer_types")
        return (True,) * layers if "sliding_window" in config else ()


FAMILY = _Mistral(name="mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096}, fixed=ONLY_VLLM)
