"""Mistral 7B and related dense models: Llama's layer, in some models with sliding-window attention.

Invariant: no sequence is longer than the window, so windowed and full attention are the same function.
"""

from dataclasses import replace

from polyreme_trainer.megatron.families.base import Architecture, ModelFamily
from polyreme_trainer.megatron.families.hf_config import HfConfig


class _Mistral(ModelFamily):
    def architecture(self, config: HfConfig) -> Architecture:
        """As the base family, with `max_position` limited to the window."""
        arch = super().architecture(config)
        config = config.with_defaults(self.defaults)
        if "sliding_window" not in config:
            return arch
        return replace(arch, max_position=min(arch.max_position, config.integer("sliding_window")))


FAMILY = _Mistral(name="mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096})
