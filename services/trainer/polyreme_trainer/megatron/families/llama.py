"""Llama 2 and 3, dense, without biases."""

from polyreme_trainer.megatron.families.base import ModelFamily

FAMILY = ModelFamily(name="llama")
