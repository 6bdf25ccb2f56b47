"""The model families: one module each, named after the `model_type` of its config.json and holding `FAMILY`.

Adding a family is adding its module; nothing lists the modules but this package's directory.
"""

import importlib
import pkgutil
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.families.base import Architecture, ModelFamily
from polyreme_trainer.megatron.families.hf_config import HfConfig

_SHARED = {"base", "hf_config", "moe", "rope", "window"}


def known_families() -> tuple[str, ...]:
    """Every model_type that can be trained, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED))


_REFUSED = {
    "deepseek_v3": "multi-head latent attention, for which vLLM on CPU and transformers sample different tokens",
}
"""Families that people train elsewhere, and why none of them runs here."""


def find_family(model_type: str) -> ModelFamily:
    """The family of a model_type. Raises ConfigError with the known ones for another, and with the reason where there is one."""
    known = known_families()
    if reason := _REFUSED.get(model_type):
        raise ConfigError(f"a model_type of {', '.join(known)}", f"{model_type!r}: {reason}", "Choose a model of a known type.")
    if model_type not in known:
        raise ConfigError(f"a model_type of {', '.join(known)}", repr(model_type), "Choose a model of a known type.")
    family: ModelFamily = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    return family


def read_architecture(config: HfConfig) -> Architecture:
    """The architecture that the fields of a config.json describe. Raises ConfigError for what cannot be trained."""
    return find_family(config.text("model_type")).architecture(config)


def load_architecture(directory: Path) -> Architecture:
    """The architecture of a Hugging Face model directory. Raises ConfigError."""
    return read_architecture(HfConfig.load(directory))
