"""Qwen1.5, Qwen2 and Qwen2.5 (Base, Instruct, Math, Coder), dense: Llama's layer with a bias on queries, keys and values."""

from polyreme_trainer.megatron.huggingface.families.base import DENSE_LAYER, QKV_BIAS
from polyreme_trainer.megatron.huggingface.families.window import QwenFamily

FAMILY = QwenFamily(name="qwen2", layer=(*DENSE_LAYER, QKV_BIAS), defaults={"num_key_value_heads": 32})
