"""The model families, one module each. A module is named after the `model_type` in config.json and defines `FAMILY`.

Invariant: the modules of this package are the only list of families, so adding a family means adding its module.
"""

import importlib
import pkgutil
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.base import Architecture, ModelFamily
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig

_SHARED = {"base", "hf_config", "moe", "rope", "window"}


def known_families() -> tuple[str, ...]:
    """Every model_type that can be trained, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED))


_EXPERT_BIAS = "a bias in the choice of experts, in layers that are not implemented"
_REFUSED = {
    **dict.fromkeys(("dots1", "ernie4_5_moe", "lfm2_moe", "minimax_m2"), _EXPERT_BIAS),
    "deepseek_v3": "multi-head latent attention, for which vLLM on CPU and transformers sample different tokens",
}
"""Well-known families that are not supported, with the reason."""


def find_family(model_type: str) -> ModelFamily:
    """The family of a model_type. Raises ConfigError for any other, with the known ones and, where there is one, the reason."""
    known = known_families()
    if reason := _REFUSED.get(model_type):
        raise ConfigError(f"a model_type of {', '.join(known)}", f"{model_type!r}: {reason}", "Choose a model of a known type.")
    if model_type not in known:
        raise ConfigError(f"a model_type of {', '.join(known)}", repr(model_type), "Choose a model of a known type.")
    family: ModelFamily = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    return family


def read_architecture(config: HfConfig) -> Architecture:
    """The architecture that a config.json describes. Raises ConfigError for a model that cannot be trained."""
    return find_family(config.text("model_type")).architecture(config)


def load_architecture(directory: Path) -> Architecture:
    """The architecture of a Hugging Face model directory. Raises ConfigError."""
    return read_architecture(HfConfig.load(directory))
