"""The model families, one module each. A module is named after the `model_type` in config.json and defines `FAMILY`.

Invariant: the modules of this package are the only list of families, so adding a family means adding its module.
"""

import importlib
import pkgutil
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.families.base import Architecture, ModelFamily
from polyreme_trainer.megatron.families.hf_config import HfConfig

_SHARED = {"base", "hf_config", "rope"}


def known_families() -> tuple[str, ...]:
    """Every model_type that can be trained, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED))


def find_family(model_type: str) -> ModelFamily:
    """The family of a model_type. Raises ConfigError, which lists the known ones, for an unknown model_type."""
    known = known_families()
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
