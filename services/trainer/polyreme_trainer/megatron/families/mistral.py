"""Mistral 7B and its kin, dense: Llama's layer, in some models with a sliding window of attention."""

from dataclasses import replace

from polyreme_trainer.megatron.families.base import Architecture, ModelFamily
from polyreme_trainer.megatron.families.hf_config import HfConfig


class _Mistral(ModelFamily):
    def architecture(self, config: HfConfig) -> Architecture:
        """A sequence that is no longer than the window sees all of itself, so the window is the longest sequence that is run."""
        arch = super().architecture(config)
        config = config.with_defaults(self.defaults)
        if "sliding_window" not in config:
            return arch
        return replace(arch, max_position=min(arch.max_position, config.integer("sliding_window")))


FAMILY = _Mistral(name="mistral", defaults={"num_key_value_heads": 8, "sliding_window": 4096})
