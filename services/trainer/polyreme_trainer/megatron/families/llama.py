"""Llama 2 and 3, dense, without biases. Invariant: this family is the base family without any change."""

from polyreme_trainer.megatron.families.base import ModelFamily

FAMILY = ModelFamily(name="llama")
