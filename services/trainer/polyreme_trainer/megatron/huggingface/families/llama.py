"""Llama 2 and 3, dense. Invariant: this family is the base family, without fields that only vLLM's Llama would read."""

from polyreme_trainer.megatron.huggingface.families.base import ATTENTION_BIAS, MLP_BIAS, ModelFamily

ONLY_VLLM = {"bias": False, "qkv_bias": False, "llama_4_scaling": None}
"""Values of the fields that vLLM's Llama or Mistral reads and those of transformers do not."""

FAMILY = ModelFamily(
    name="llama", fixed={**ONLY_VLLM, "sliding_window": None}, biases={"attention_bias": ATTENTION_BIAS, "mlp_bias": MLP_BIAS}
)
