"""The sliding window of Qwen's families. Pure.

Invariant: a window is read only where every layer has it, since vLLM computes no Qwen with windows in some of its layers.
"""

from polyreme_trainer.megatron.families.base import ModelFamily
from polyreme_trainer.megatron.families.hf_config import HfConfig

SLIDING = "sliding_attention"
FULL = "full_attention"


class QwenFamily(ModelFamily):
    """A family whose config.json switches the window on by `use_sliding_window`, from the layer `max_window_layers` on."""

    def sliding_layers(self, config: HfConfig, layers: int) -> tuple[bool, ...]:
        config = config.with_defaults({"use_sliding_window": False, "sliding_window": 4096})
        if not config.flag("use_sliding_window"):
            config.only("layer_types", [FULL] * layers)
            return ()
        if "layer_types" in config:
            config.only("layer_types", [SLIDING] * layers)
        else:
            config.with_defaults({"max_window_layers": 28}).only("max_window_layers", 0)
        return (True,) * layers
