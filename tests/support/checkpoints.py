"""Checkpoints for tests that have no learner and no stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import CheckpointWriter, Save
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.training.roles import Role


def save(path: Path, roles: Sequence[Role[Any]], facts: Mapping[str, Any], keep: int = 100) -> None:
    """Writes a checkpoint and waits until it is complete. Collective."""
    alone = torch.distributed.get_world_size() == 1
    ranks = Ranks(torch.distributed.get_rank(), None if alone else BroadcastChannel(torch.device("cpu")))
    writer = CheckpointWriter(ranks)
    writer.start(Save(path, roles, lambda: facts, keep))
    assert writer.finish(wait=True) is not None
    ranks.close()
