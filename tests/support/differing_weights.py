"""A program for two data ranks, as on two machines: both read the same model, then each reads a different one."""

from pathlib import Path

import torch

from polyreme.config.model import ModelConfig
from polyreme.config.trainer import ParallelConfig
from polyreme.errors import ConfigError
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.models.model import check_same_weights
from polyreme_trainer.megatron.models.policy import build_policy
from support.configs import run_config


def compare(folder: str) -> None:
    """Reads the models a and b in `folder`."""
    device = Device("cpu")
    init_parallel(ParallelConfig(data=2), device)
    own = "ab"[torch.distributed.get_rank()]
    for name, found in (("a", "the same"), (own, "others")):
        config = run_config(Path(folder), model=ModelConfig(path=Path(folder) / name))
        try:
            check_same_weights(build_policy(config.model.path, config, device))
            assert found == "the same"
        except ConfigError as error:
            assert found == "others" and "the same weights at model.path" in str(error)
