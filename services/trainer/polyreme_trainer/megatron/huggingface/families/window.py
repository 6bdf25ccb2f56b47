"""The sliding window of Qwen's families. The module is pure.

Invariant: a window is accepted only if every layer has it, since vLLM does not support Qwen models with windows in some layers.
"""

from polyreme_trainer.megatron.huggingface.families.base import ModelFamily
from polyreme_trainer.megatron.huggingface.families.hf_config import FULL, SLIDING, HfConfig


class QwenFamily(ModelFamily):
    """A family whose config.json enables the window with `use_sliding_window`, starting at layer `max_window_layers`."""

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
